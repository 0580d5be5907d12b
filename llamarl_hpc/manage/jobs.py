"""The Slurm jobs of a run: which there were, and which of them have not ended."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from typing import Any

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.launch import queue
from llamarl_hpc.run_dir import RunDir

DAY_S = 86_400.0
_ANSWER_S = 15.0  # a person waits for it
# A job is submitted once the one before has ended, or to follow it: older ones are not asked for.
_NEWEST = 3
ROLES = ("trainer", "generator", "reward", "reference")  # as launch/request.py orders components
_COMPONENT = re.compile(r"^# component (\d+): (.+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class RunningIn:
    """A Slurm job that was to do, or did, attempts of a run."""

    job_id: str  # the leader's
    cluster: str = ""  # empty: the default one
    submitted: float  # seconds of the epoch
    is_ours: bool = True  # made by `submit`; else by hand (sbatch, salloc)


def jobs_of(run: RunDir) -> list[RunningIn]:
    """All jobs that were submitted for the run, or made an attempt of it, oldest first."""
    found: dict[str, RunningIn] = {}
    info = run.read_info()
    for script in (run.path / "slurm").glob("*_submission.sh"):
        name = script.name.removesuffix("_submission.sh")
        found[name] = RunningIn(job_id=name, submitted=script.stat().st_mtime)
    for attempt in info.get("attempts", []):
        if name := attempt.get("job_id"):
            began = float(attempt.get("started", 0.0))
            found.setdefault(name, RunningIn(job_id=name, submitted=began, is_ours=False))
    for entry in info.get("jobs", []):
        found[entry["id"]] = RunningIn(
            job_id=entry["id"],
            cluster=entry.get("cluster", ""),
            submitted=float(entry.get("submitted", 0.0)),
        )
    return sorted(found.values(), key=lambda job: (job.submitted, int(job.job_id)))


def newest_job(run: RunDir) -> RunningIn | None:
    """The job that has the run now, or had it last; None when that was no job."""
    jobs = jobs_of(run)
    attempts = run.read_info().get("attempts", [])
    if not jobs:
        return None
    is_local = bool(attempts) and not attempts[-1].get("job_id")
    return None if is_local and attempts[-1].get("started", 0.0) > jobs[-1].submitted else jobs[-1]


def component_names(run: RunDir, job_id: str) -> dict[int, str]:
    """What the batch script of a job calls its components; empty without such a script (a job by
    hand, whose components have the order of ROLES)."""
    try:
        script = (run.path / "slurm" / f"{job_id}_submission.sh").read_text()
    except OSError:
        return {}
    return {int(number): name for number, name in _COMPONENT.findall(script)}


def ask_about(jobs: list[RunningIn]) -> queue.Report:
    """What Slurm says of them, for a person who waits."""
    merged = queue.Report(views={}, failures=[], is_complete=True)
    for cluster in sorted({job.cluster for job in jobs}):
        there = [job for job in jobs if job.cluster == cluster]
        report = queue.ask(
            [job.job_id for job in there],
            since=min(job.submitted for job in there) - DAY_S,
            cluster=cluster,
            run=lambda argv: queue.run_command(argv, timeout_s=_ANSWER_S),
        )
        merged = queue.Report(
            views=merged.views | report.views,
            failures=merged.failures + report.failures,
            is_complete=merged.is_complete and report.is_complete,
            gone=merged.gone | report.gone,
        )
    return merged


def active_jobs(run: RunDir) -> list[tuple[RunningIn, queue.JobView]]:
    """Jobs of the run that wait or run. Raises ConfigError when Slurm does not say."""
    jobs = jobs_of(run)[-_NEWEST:]
    if not jobs:
        return []
    names = ", ".join(job.job_id for job in jobs)
    if not has_slurm():
        raise ConfigError(
            f"this run was submitted to Slurm (job {names}), which is not on this machine; call "
            "this on a login node of the cluster"
        )
    report = ask_about(jobs)
    if silent := [j.job_id for j in jobs if j.job_id not in report.views.keys() | report.gone]:
        raise ConfigError(
            f"Slurm does not say whether job {', '.join(silent)} goes on "
            f"({'; '.join(report.failures)}); try again in a minute"
        )
    known = [(job, report.views.get(job.job_id)) for job in jobs if job.job_id not in report.gone]
    return [(job, view) for job, view in known if view is not None and not view.has_ended]


def is_restarted(attempt: dict[str, Any], view: queue.JobView) -> bool:
    """The job was requeued and runs again, and its new controller has not written anything yet."""
    ended = attempt.get("ended")
    return bool(ended and view.start and view.start >= float(ended))


def has_slurm() -> bool:
    """Whether jobs can be asked for on this machine."""
    return any(shutil.which(command) for command in ("squeue", "sacct"))
