"""A run as a Slurm job that is interrupted on purpose, and what a test asks of it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_run import attempts_of, cli, lines_of

_DEADLINE_S = 600.0  # for a hang, not for a slow machine


def slurm(*argv: str, check: bool = True) -> str:
    """A command of Slurm's; what it printed."""
    return subprocess.run(
        argv, check=check, capture_output=True, text=True, errors="replace", timeout=60.0
    ).stdout


def start_soon(job_id: str) -> None:
    """A requeued job, which Slurm would let wait for two minutes. A time limit that was cut to less
    than a minute has become 0 by now, so it gets another. A node does not take a job in the second
    in which it has ended its last start ("credential revoked")."""
    for component in slurm("squeue", "-h", "-o%A", f"-j{job_id}").split():
        slurm("scontrol", "update", f"jobid={component}", "timelimit=10", "starttime=now+2")


class JobRun:
    """A run folder and the Slurm jobs that make its attempts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def submit(cls, config: Path, folder: Path) -> JobRun:
        answer = cli("submit", config, "--run-dir", folder)
        assert answer.code == 0, answer.err
        return cls(folder)

    @property
    def job_id(self) -> str:
        """Of the newest job."""
        return str(json.loads((self.folder / "run.json").read_text())["jobs"][-1]["id"])

    @property
    def attempts(self) -> list[dict[str, Any]]:
        return attempts_of(self.folder)

    def said(self) -> str:
        """Everything there is to read after a failure."""
        logs = [*self.folder.glob("**/*_log.*"), *self.folder.glob("attempts/*/*.log")]
        texts = [f"--- {log.relative_to(self.folder)}\n{log.read_text()[-1500:]}" for log in logs]
        queue = slurm("squeue", "-a", "-t", "all", "-o", "%i %T %r %S %e", check=False)
        return "\n".join([json.dumps(self.attempts, indent=1), queue, *texts])

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"no {what}:\n{self.said()}"
            time.sleep(0.1)

    def wait_for_start(self, attempt: int) -> None:
        """Until this attempt has written itself down."""
        self.wait(f"attempt {attempt}", lambda: len(self.attempts) >= attempt)

    def wait_for_step(self, attempt: int) -> None:
        """Until this attempt has made an optimizer step."""
        self.wait(
            f"step in attempt {attempt}",
            lambda: any(
                line.get("attempt") == attempt and "step" in line for line in lines_of(self.folder)
            ),
        )

    def wait_for_end(self, attempt: int) -> dict[str, Any]:
        """Until this attempt says how it ended; its entry in run.json."""
        self.wait(
            f"end of attempt {attempt}",
            lambda: (
                len(self.attempts) >= attempt and self.attempts[attempt - 1]["outcome"] != "running"
            ),
        )
        return self.attempts[attempt - 1]

    def states(self) -> set[str]:
        """Of the newest job's components."""
        return set(slurm("squeue", "-ha", "-tall", "-o%T", f"-j{self.job_id}").split())

    def start_again(self) -> None:
        """Once the job waits again."""
        self.wait("job back in the queue", lambda: self.states() == {"PENDING"})
        start_soon(self.job_id)
