"""From what a person types to a run folder, and from a run folder to its jobs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from llamarl_hpc.errors import RunDirError
from llamarl_hpc.launch.queue import Run, run_command
from llamarl_hpc.manage.jobs import component_names
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.slurm_text.job_id import JobId, parse_job_id
from llamarl_hpc.slurm_text.show_job import parse_job_records

_BELOW = ("run.json", "*/run.json", "*/*/run.json", "*/*/*/run.json")  # of the current folder


def find_run(text: str | Path, *, run: Run = run_command) -> RunDir:
    """The run that is meant by its folder, a folder above it (then the newest run in it), or the id
    of a job of it (`700`, `700+1`). Raises RunDirError."""
    path = Path(text)
    job = parse_job_id(str(text))
    if job is None or path.exists():
        return RunDir.open(path)
    if job.array:
        raise RunDirError(f"{text} is a job of an array, which is never a run")
    folder = _known_to_scontrol(job.job, run) or _below_here(job.job)
    folder = folder or _known_to_sacct(job.job, run)
    if folder is None:
        raise RunDirError(
            f"neither Slurm nor a run folder below {Path.cwd()} knows of a run in job {job.job}; "
            "give the run folder"
        )
    _check_component(folder, job)
    return folder


def _check_component(run: RunDir, job: JobId) -> None:
    names = component_names(run, job.job)
    if names and job.component is not None and job.component not in names:
        known = ", ".join(f"{job.job}+{number} ({name})" for number, name in sorted(names.items()))
        raise RunDirError(f"job {job.job} has no component {job.component}; it has {known}")


# ------------------------------------------------------------------ by the id of a job


def _known_to_scontrol(job: str, run: Run) -> RunDir | None:
    answer = run(["scontrol", "show", "job", job])
    if answer.returncode:
        return None
    for found, values in parse_job_records(answer.stdout):
        if found.job == job and (folder := _run_of_file(values.get("StdOut", ""))):
            return folder
    return None


def _known_to_sacct(job: str, run: Run) -> RunDir | None:
    columns = ["--allocations", "--noheader", "--parsable2", "--format=SubmitLine"]
    answer = run(["sacct", *columns, f"--jobs={job}"])
    for line in answer.stdout.splitlines():  # sbatch --parsable RUN/slurm/FILE, without any quotes
        for start in re.finditer(r"(?<=[ '])/", line):
            if folder := _run_of_file(line[start.start() :].rstrip("'")):
                return folder
    return None


def _run_of_file(name: str) -> RunDir | None:
    """Of a file in RUN/slurm."""
    run = RunDir(Path(name).parent.parent)
    return run if name.startswith("/") and run.config.is_file() else None


def _below_here(job: str) -> RunDir | None:
    for pattern in _BELOW:
        for path in Path.cwd().glob(pattern):
            try:
                info: dict[str, Any] = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            ids = [entry.get("id") for entry in info.get("jobs", [])]
            ids += [entry.get("job_id") for entry in info.get("attempts", [])]
            if job in ids:
                return RunDir(path.parent)
    return None
