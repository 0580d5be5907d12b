"""A run, seen from a notebook: what it does, what it made, and the way to stop it and go on."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.notebook.background import (
    begin_or_end,
    check_here,
    end_before_attempt,
    start_background,
)
from llamarl_hpc.notebook.changes import Changes, as_overrides
from llamarl_hpc.notebook.status import Status
from llamarl_hpc.notebook.views import Slot, Text
from llamarl_hpc.notebook.watching import Cell, Lines, Observer
from llamarl_hpc.run_dir import RunDir

if TYPE_CHECKING:
    import pandas as pd

    from analysis.figures import Picture
    from analysis.read_run import Run as StoredRun
    from analysis.stored_rollout import StoredRollout

DAY_S = 86_400.0
_EXPORT_S = 3600.0


class StillGoingOn(ConfigError, TimeoutError):
    """The run has not ended within the time that was given."""


class Run:
    """Handle on a run folder; any number of them may look at one run."""

    def __init__(self, folder: RunDir) -> None:
        self.folder = folder

    @classmethod
    def attach(cls, run: Path | str | int) -> Run:
        """The run that is meant by its folder, a folder above it (then the newest run in it), or
        the id of a Slurm job. Raises RunDirError."""
        from llamarl_hpc.manage.find import find_run

        return cls(find_run(run if isinstance(run, Path) else str(run)))

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder.path

    @property
    def job_id(self) -> str | None:
        """Of the newest Slurm job of the run; None when there was none."""
        from llamarl_hpc.manage.jobs import newest_job

        job = newest_job(self.folder)
        return None if job is None else job.job_id

    def __repr__(self) -> str:
        job = "" if self.job_id is None else f"job {self.job_id}, "
        return f"Run({job}{self.path})"

    # ------------------------------------------------------------------ what it does

    def status(self, *, ask_slurm: bool = True) -> Status:
        """State, step, reward, staleness, time left, components of the job and why they wait."""
        from llamarl_hpc.manage.status import read_status

        here = begin_or_end(self.folder)  # first: what it does not know is in the folder by now
        figures = read_status(self.folder, ask_slurm=ask_slurm)
        if here is not None:
            figures |= dict(zip(("state", "reason"), here, strict=True))
        return Status(figures)

    def wait(self, timeout_s: float = DAY_S, *, every_s: float = 1.0) -> Status:
        """Wait until the run has ended, and say how. Raises StillGoingOn after `timeout_s`."""
        look, deadline = Observer(self.status), time.monotonic() + timeout_s
        while True:
            status, is_over = look()
            if is_over:
                return status
            if time.monotonic() > deadline:
                raise StillGoingOn(
                    f"{self.path} is {status.state} with {status.step} of {status.max_steps} steps "
                    f"made after {timeout_s:.0f} s; wait longer, or stop it with cancel()"
                )
            time.sleep(every_s)

    def watch(
        self,
        panels: Sequence[str] | None = None,
        *,
        every_s: float = 5.0,
        until_step: int | None = None,
        timeout_s: float = DAY_S,
    ) -> None:
        """Status and curves in the output of this cell, anew every few seconds, until the run has
        ended or has made `until_step` steps. Interrupting the kernel ends the watching, not the
        run. Without a notebook: one line a step."""
        show = Cell(lambda: self._figure(panels)) if Slot.is_there() else Lines()
        look, deadline = Observer(self.status), time.monotonic() + timeout_s
        while True:
            status, is_over = look()
            show(status)
            enough = until_step is not None and status.step >= until_step
            if is_over or enough or time.monotonic() > deadline:
                return
            time.sleep(every_s)

    def logs(
        self, executor: str = "controller", *, lines: int = 50, attempt: int | None = None
    ) -> Text:
        """The last lines of an executor's logs: `controller`, `trainer`, `generator.1`,
        `generator` (all replicas), `reward`. Of the newest attempt unless told otherwise."""
        from llamarl_hpc.manage.logs import follow_logs

        found = follow_logs(self.folder, executor, attempt, lines=lines, follow=False)
        return Text("\n".join(found))

    # ------------------------------------------------------------------ what it made

    @cached_property
    def _stored(self) -> StoredRun:
        from analysis.read_run import Run as StoredRun

        return StoredRun(self.folder)

    @property
    def stored(self) -> StoredRun:
        """The run as `analysis` reads it, with what has come since."""
        self._stored.refresh()
        return self._stored

    def metrics(self) -> pd.DataFrame:
        """A row for each optimizer step that counts after resumes, indexed by step."""
        return self.stored.metrics()

    def evaluations(self) -> pd.DataFrame:
        """Held-out accuracy by policy version, with its 95 % interval."""
        from analysis import curves

        return curves.evaluations(self.stored)

    def rollouts(
        self,
        step: int | None = None,
        *,
        steps: tuple[int, int] | None = None,
        status: str | None = None,
        purpose: str | None = "train",
        prompt: str | None = None,
        reward: tuple[float, float] | None = None,
        text: bool = True,
    ) -> pd.DataFrame:
        """A row for each completion: of one step, of steps (first, last), or of all; of a `status`
        (trained, dropped, abandoned); of a `prompt` (its prompt_id or how that begins); with a
        `reward` (least, most). `purpose="eval"`: the held-out questions, whose step is the policy
        version; None: both."""
        if step is not None and steps is not None:
            raise ConfigError("give step or steps, not both")
        return self.stored.rollouts(
            text=text,
            steps=steps if step is None else (step, step),
            status=status,
            purpose=purpose,
            prompt=prompt,
            reward=reward,
        )

    def rollout(self, rollout_id: int) -> StoredRollout:
        """One completion with its tokens, log-probs and policy versions. Raises ConfigError."""
        try:
            return self.stored.rollout(rollout_id)
        except KeyError:
            raise ConfigError(
                f"there is no rollout {rollout_id} in {self.path}; rollouts() lists them"
            ) from None

    def plot(self, panels: Sequence[str] | None = None, *, live: bool = False) -> Picture | None:
        """A matplotlib figure of the run so far: reward, held-out accuracy, staleness, lengths,
        idle shares, seconds a step; or the `panels` that are named (analysis/panels.py). `live`:
        the same as `watch`."""
        if live:
            self.watch(panels)
            return None
        return self._figure(panels)

    def _figure(self, panels: Sequence[str] | None) -> Picture:
        from analysis.figures import figure

        return figure(self.stored, panels)

    def report(self, out: Path | str | None = None) -> Path:
        """Write the self-contained HTML report and return where it is."""
        from analysis.report import write_report

        return write_report(self.stored, None if out is None else Path(out).absolute())

    def export(self, out: Path | str, *, step: int | None = None) -> Path:
        """Write a checkpoint (default: the newest) as a Hugging Face folder, in a process of its
        own. Raises ConfigError."""
        target = Path(out).absolute()
        chosen = [] if step is None else ["--step", f"{step}"]
        program = [sys.executable, "-m", "llamarl_hpc.cli.main", "export", str(self.path)]
        done = subprocess.run(
            [*program, "--out", str(target), *chosen],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_EXPORT_S,
            check=False,
        )
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()]
            reason = said[-1].removeprefix("error: ") if said else f"exit code {done.returncode}"
            raise ConfigError(f"the export failed: {reason}")
        return target

    # ------------------------------------------------------------------ stopping, going on

    def cancel(self, *, now: bool = False, timeout_s: float = 600.0) -> Text:
        """End the run after the step that is under way, with a checkpoint (`now`: without), and
        say how it ended. Raises ConfigError when it cannot be reached from here."""
        from llamarl_hpc.manage.cancel import cancel_run

        if end_before_attempt(self.folder):
            return Text("the run had not begun its attempt; its process was ended")
        return Text(cancel_run(self.folder, now=now, wait_s=timeout_s))

    def resume(self, changes: Changes = None) -> Run:
        """Go on from the newest checkpoint: as a Slurm job if the run was one, else in the
        background of this machine. Raises ConfigError when it goes on already, is complete, or a
        change is not allowed."""
        from llamarl_hpc.manage.jobs import jobs_of
        from llamarl_hpc.manage.resume import resume_run

        overrides = as_overrides(changes)
        if any(job.is_ours for job in jobs_of(self.folder)):
            resume_run(self.folder, overrides)
        else:
            self._resume_here(overrides)
        return self

    def _resume_here(self, overrides: Sequence[str]) -> None:
        from llamarl_hpc.manage.resume import check_resumable

        if self.status(ask_slurm=False).state == "starting":
            raise ConfigError(f"{self.path} is starting; wait for its end, or cancel() it")
        check_here(check_resumable(self.folder, overrides))
        self.folder.stop_requested.unlink(missing_ok=True)
        start_background(self.folder, overrides)
