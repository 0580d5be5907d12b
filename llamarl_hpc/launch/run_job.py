"""The Slurm job of a run as a submitit job, whose result is what the run folder says.

A run outlives its job: it may be requeued (the same id starts again) or continued by another job
(`continued_by` of the attempt in run.json). This handle stands for all of that: it is done when the
last of it is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llamarl_hpc.launch.slurm import HetSlurmJob
from llamarl_hpc.run_dir import RunDir

_RESUBMITTED = "resubmission:"
_REQUEUED = "requeue"
_REST_S = 10.0


class RunJob(HetSlurmJob[dict[str, Any]]):
    """The job of a run. Its folder is RUN/slurm; its result is the attempt's entry in run.json."""

    _successor: RunJob | None = None

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        super().__init__(folder, job_id, tasks)
        self._ended: dict[int, float] = {}  # attempt -> when Slurm first said so, monotonic

    @property
    def run(self) -> RunDir:
        return RunDir(Path(self.paths.folder).parent)

    @property
    def newest(self) -> RunJob:
        """This job, or the one that continues the run now."""
        attempt = self._own_attempt()
        how = str((attempt or {}).get("continued_by") or "")
        if not how.startswith(_RESUBMITTED):
            return self
        job_id = how.removeprefix(_RESUBMITTED)
        if self._successor is None or self._successor.job_id != job_id:
            self._successor = type(self)(self.paths.folder, job_id)
            self._successor.placed(cluster=self.cluster, component_names=self.component_names)
        return self._successor.newest

    def attempt(self) -> dict[str, Any] | None:
        """The newest attempt of this job, or of those that continue it; None before its controller
        has begun."""
        return self.newest._own_attempt() or self._own_attempt()

    def _own_attempt(self) -> dict[str, Any] | None:
        made = [a for a in self.run.read_info().get("attempts", []) if self._made(a)]
        return made[-1] if made else None

    def _made(self, attempt: dict[str, Any]) -> bool:
        return bool(attempt.get("job_id") == self.job_id)

    @property
    def state(self) -> str:
        """Of the job that has the run now."""
        newest = self.newest
        return super().state if newest is self else newest.state

    @property
    def component_states(self) -> dict[str, str]:
        newest = self.newest
        return super().component_states if newest is self else newest.component_states

    def _has_result(self) -> bool:
        attempt = self._own_attempt()
        if attempt is None or attempt["outcome"] == "running":
            return False
        return attempt.get("continued_by") != _REQUEUED  # else the next attempt will have it

    def done(self, force_check: bool = False) -> bool:
        """Whether the run says so, or Slurm."""
        newest = self.newest
        if newest is not self:
            return newest.done(force_check)
        mode = "force" if force_check else "standard"
        if self._has_result():
            return True
        return bool(self.watcher.is_done(self.job_id, mode=mode)) and self._stays_ended()

    def _stays_ended(self) -> bool:
        """Between two starts of a requeued job its end may be seen; so it is looked at again."""
        attempt = self._own_attempt()
        if attempt is None or attempt.get("continued_by") != _REQUEUED:
            return True
        now = time.monotonic()
        if now - self._ended.setdefault(attempt["number"], now) >= _REST_S:
            return True
        self.watcher.watch_again(self.job_id)
        return False

    def wait_for_slurm(self, timeout_s: float = 60.0) -> None:
        newest = self.newest
        if newest is self:
            super().wait_for_slurm(timeout_s)
        else:
            newest.wait_for_slurm(timeout_s)

    def cancel(self, check: bool = True) -> None:
        """End this job and the one that continues it at once; nothing continues the run then."""
        self.run.stop_requested.touch()
        newest = self.newest
        if newest is not self:
            newest.cancel(check)
        else:
            super().cancel(check)

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        newest = self.newest
        if newest is not self:
            return newest._get_outcome_and_result()
        deadline = time.monotonic() + self._results_timeout_s
        while not self._has_result() and time.monotonic() < deadline:
            time.sleep(1.0)
        attempt = self._own_attempt()
        if attempt is None or attempt["outcome"] == "running":
            return "error", self._died()
        if attempt["outcome"] == "done":
            return "success", attempt
        return "error", f"{attempt['outcome']}: {attempt['reason']}"

    def _died(self) -> str:
        """What is known of a controller that could not say how it ended."""
        why = self.watcher.why_lost(self.job_id) or f"the job ended as {self.state}"
        words = (self.stderr() or self.stdout() or "").splitlines()[-20:]
        return "\n".join([f"{why} and the run does not say how", *words])
