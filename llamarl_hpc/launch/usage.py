"""Ask sacct what the jobs of a run took."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from typing import Any

from llamarl_hpc.launch.queue import Run, run_command
from llamarl_hpc.slurm_text.job_usage import COLUMNS

_TIMEOUT_S = 20.0
_MARGIN_S = 86_400.0  # sacct is asked for jobs from a day before the submission on


def usage_text(info: dict[str, Any], run: Run | None = None) -> str:
    """What sacct prints about the jobs that run.json names; empty where there is no sacct, no job,
    or no answer."""
    jobs = job_ids(info)
    if not jobs or (run is None and shutil.which("sacct") is None):
        return ""
    since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(info.get("created", 0) - _MARGIN_S))
    columns = f"--format={','.join(COLUMNS)}"
    words = ["sacct", "--allocations", "--duplicates", "--noheader", "--parsable2", columns]
    where = [f"--clusters={name}" for name in _clusters(info)]
    argv = [*words, *where, f"--starttime={since}", f"--jobs={','.join(jobs)}"]
    answer = run(argv) if run is not None else run_command(argv, timeout_s=_TIMEOUT_S)
    return answer.stdout if answer.returncode == 0 else ""


def job_ids(info: dict[str, Any]) -> list[str]:
    """Leaders' ids of all jobs of a run, each once, in order."""
    named = [job.get("id") for job in info.get("jobs", [])]
    named += [attempt.get("job_id") for attempt in info.get("attempts", [])]
    return list(dict.fromkeys(str(name) for name in named if name))


def _clusters(info: dict[str, Any]) -> Iterable[str]:
    names = dict.fromkeys(job.get("cluster") for job in info.get("jobs", []))
    chosen = ",".join(str(name) for name in names if name)
    return [chosen] if chosen else []
