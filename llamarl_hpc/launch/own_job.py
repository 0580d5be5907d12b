"""The Slurm job that this process runs in: how long it lasts, and how it is continued.

A heterogeneous job is asked about, requeued and waited for by its leader's id, which stands for all
components; their own ids are refused. Commands that fail leave everything as it was known.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.launch.allocation import allocation, restart_count
from llamarl_hpc.launch.queue import Answer, Run, run_command
from llamarl_hpc.slurm_text.job_end import (
    REQUEUED,
    ComponentRecord,
    JobNow,
    component_records,
    job_now,
)
from llamarl_hpc.slurm_text.sbatch_answer import Submitted, parse_submission

log = logging.getLogger(__name__)

_KILL_WAIT_S = 30.0  # Slurm's default
_TIMEOUT_S = 30.0  # of a command: nobody waits longer for a scheduler that does not answer
_REPAIRS, _PAUSE_S = 10, 1.0
_SCRIPT_BYTES = 1 << 20


def _patiently(argv: Sequence[str]) -> Answer:
    return run_command(argv, timeout_s=_TIMEOUT_S)


class OwnJob:
    """`look` now and then; `requeue` or `resubmit` last, when everything else is written down."""

    def __init__(self, job_id: str, *, restarts: int = 0, run: Run = _patiently) -> None:
        """`restarts`: how often Slurm had started the job again when this process began."""
        self.job_id, self.restarts = job_id, restarts
        self._run = run
        self._restarts: dict[int, int] = {}  # by component
        self._complaint = ""

    @classmethod
    def find(cls, environ: Mapping[str, str], run: Run = _patiently) -> OwnJob | None:
        """The job that `environ` describes, if this process may speak for it: not in a job step,
        whose end is not the job's business."""
        job = allocation(environ)
        if job is None or job.in_step:
            return None
        return cls(job.job_id, restarts=restart_count(environ), run=run)

    # ------------------------------------------------------------------ looking

    def look(self) -> JobNow | None:
        """What Slurm says now; None when it does not answer."""
        records = self._records()
        for record in records:  # after repairs the components' counts may differ
            known = record.restarts if record.runs else self.restarts
            self._restarts.setdefault(record.component, known)
        return job_now(records, self._restarts)

    def _records(self) -> list[ComponentRecord]:
        # in UTC: a time without a zone would be read wrongly in the hour that a zone repeats
        answer = self._run(["env", "TZ=UTC0", "scontrol", "show", "job", self.job_id])
        complaint = "" if not answer.returncode else " ".join(answer.stderr.split())
        if complaint and complaint != self._complaint:
            log.warning("scontrol does not tell when job %s ends: %s", self.job_id, complaint)
        self._complaint = complaint
        return component_records(answer.stdout) if not answer.returncode else []

    def kill_wait_s(self) -> float:
        """Seconds from SIGTERM to SIGKILL when Slurm ends a job."""
        answer = self._run(["scontrol", "show", "config"])
        found = re.search(r"^KillWait\s*=\s*(\d+)", answer.stdout, re.MULTILINE)
        return float(found[1]) if found else _KILL_WAIT_S

    # ------------------------------------------------------------------ going on

    def requeue(self, sleep: Callable[[float], None] = time.sleep) -> str:
        """Have Slurm start the job again, all of it. Returns why not, or nothing.

        After a node failure Slurm may have requeued some components and ended others, and such a
        job would wait for ever: asked again, it takes up the rest, although it says that it failed.
        """
        answer = self._run(["scontrol", "requeue", self.job_id])
        for _ in range(_REPAIRS):
            now = self.look()
            if now is None or not now.is_half_requeued:
                break
            sleep(_PAUSE_S)
            answer = self._run(["scontrol", "requeue", self.job_id])
        else:
            return f"job {self.job_id} is requeued in part and would never start"
        if not answer.returncode or (now is not None and now.ending == REQUEUED):
            return ""
        said = " ".join(answer.stderr.split()) or f"exit code {answer.returncode}"
        return f"scontrol requeue {self.job_id}: {said}"

    def script(self) -> str:
        """The batch script of this job, as Slurm keeps it. Raises ConfigError."""
        answer = self._run(["scontrol", "write", "batch_script", self.job_id, "-"])
        text = answer.stdout[:_SCRIPT_BYTES]
        if answer.returncode or not text.startswith("#!"):
            said = " ".join(answer.stderr.split()) or "it is not known to Slurm"
            raise ConfigError(f"the batch script of job {self.job_id} cannot be had: {said}")
        return text

    def resubmit(self, script: Path, arguments: Sequence[str]) -> Submitted:
        """Submit `script` again, to start once this job has ended. Raises ConfigError."""
        answer = self._run(
            [
                "sbatch",
                "--parsable",
                f"--dependency=afterany:{self.job_id}",
                str(script),
                *arguments,
            ]
        )
        return parse_submission(answer.stdout, answer.stderr, answer.returncode)
