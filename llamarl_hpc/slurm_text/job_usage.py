"""What jobs took, from sacct: when they waited, when they ran, on what."""

from __future__ import annotations

from dataclasses import dataclass

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.slurm_text.gres import count_gpus
from llamarl_hpc.slurm_text.job_id import parse_job_id
from llamarl_hpc.slurm_text.moment import parse_moment

# `sacct --parsable2 --noheader` prints these between bars.
COLUMNS = ("JobID", "Submit", "Eligible", "Start", "End", "ElapsedRaw", "AllocCPUS", "AllocTRES")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobUsage:
    """One allocation: a job, or one component of a heterogeneous one, from one start to its end."""

    job: str  # the leader's id
    component: int | None
    wait_s: float | None  # in the queue, from when it could have started; None: not known
    elapsed_s: float
    cpus: int
    gpus: int


def parse_usage(text: str) -> list[JobUsage]:
    """Rows of allocations; steps, headers and rows that are cut short are left out."""
    found = []
    for line in text.splitlines():
        values = dict(zip(COLUMNS, line.split("|"), strict=False))
        job = parse_job_id(values["JobID"])
        if job is None or job.step or job.array or len(values) < len(COLUMNS):
            continue
        found.append(
            JobUsage(
                job=job.job,
                component=job.component,
                wait_s=_wait(values),
                elapsed_s=float(values["ElapsedRaw"]) if values["ElapsedRaw"].isdigit() else 0.0,
                cpus=int(values["AllocCPUS"]) if values["AllocCPUS"].isdigit() else 0,
                gpus=_gpus(values["AllocTRES"]),
            )
        )
    return found


def _wait(values: dict[str, str]) -> float | None:
    """From submission, or from when a dependency or a begin time let it start."""
    start = parse_moment(values["Start"])
    since = [parse_moment(values[name]) for name in ("Submit", "Eligible")]
    known = [moment for moment in since if moment is not None]
    if start is None or not known:
        return None
    return max(0.0, start - max(known))


def _gpus(tres: str) -> int:
    try:
        return count_gpus(tres, nodes=1) if "=" in tres else 0
    except ConfigError:  # a count that is no number
        return 0
