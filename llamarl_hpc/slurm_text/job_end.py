"""From `scontrol show job`: until when a running job runs, and why it is being ended.

Times are read as UTC (ask with TZ=UTC0): in the hour that a zone repeats, a time without a zone
means two moments. While a component is being ended Slurm shows COMPLETING and hides the state
behind it, so why it ends is put together from what else the record says.
"""

from __future__ import annotations

import calendar
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llamarl_hpc.slurm_text.job_state import is_final, parse_state
from llamarl_hpc.slurm_text.show_job import parse_job_records

REQUEUED, PREEMPTED, CANCELLED = "requeue", "preemption", "cancellation"

_RUNS = {"RUNNING", "SUSPENDED", "CONFIGURING", "SIGNALING", "STOPPED", "RESIZING"}
_WHY = {
    "NODE_FAIL": "node failure",
    "NODEDOWN": "node failure",
    "BOOT_FAIL": "node failure",
    "TIMEOUT": "time limit",
    "TIMELIMIT": "time limit",
    "DEADLINE": "time limit",
    "OUT_OF_MEMORY": "out of memory",
    "OUTOFMEMORY": "out of memory",
    "PREEMPTED": PREEMPTED,
    "FAILED": "failure",
}


@dataclass(frozen=True, kw_only=True)
class ComponentRecord:
    """One component of a job, or an ordinary job."""

    component: int = 0
    state: str  # RUNNING, COMPLETING, ...
    reason: str = ""
    end: float | None = None  # Unix time at which its limit ends it; None: there is no limit
    restarts: int = 0
    preempted: bool = False  # Slurm has begun to take it away

    @property
    def runs(self) -> bool:
        return self.state in _RUNS

    @property
    def why_over(self) -> str:
        """Of a record that does not run: what ended it, as far as Slurm says."""
        for word in (self.state, self.reason.upper()):
            if word in _WHY:
                return _WHY[word]
        return PREEMPTED if self.preempted else CANCELLED


@dataclass(frozen=True, kw_only=True)
class JobNow:
    """The whole job at one moment."""

    end: float | None  # Unix time of the component that ends first; None: no limit
    ending: str = ""  # why Slurm is ending the job; empty while it runs
    lost: Mapping[int, str] = field(default_factory=dict)  # ended components of a running job, why
    preempted: bool = False  # it runs, for as long as `end` says
    is_half_requeued: bool = False  # a part of it is not to start again, so none of it ever will


def component_records(text: str) -> list[ComponentRecord]:
    """All components; what is no record is left out."""
    return [
        ComponentRecord(
            component=job.component or 0,
            state=parse_state(values.get("JobState", "")),
            reason=values.get("Reason", ""),
            end=_moment(values.get("EndTime", "")),
            restarts=_number(values.get("Restarts", "")),
            preempted=_moment(values.get("PreemptTime", "")) is not None,
        )
        for job, values in parse_job_records(text)
    ]


def job_now(records: Sequence[ComponentRecord], restarts: Mapping[int, int]) -> JobNow | None:
    """The job as its records show it; None without any. `restarts`: of each component when this
    process began (missing: as now); a higher number means that Slurm has requeued it."""
    if not records:
        return None
    ends = [record.end for record in records if record.runs and record.end is not None]
    over = [record for record in records if not record.runs]
    requeued = [r for r in records if r.restarts > restarts.get(r.component, r.restarts)]
    first = min(records, key=lambda record: record.component)
    if requeued:
        ending = REQUEUED
    elif not first.runs:  # with the first component the others end, too
        reasons = [record.why_over for record in over]
        ending = next((reason for reason in reasons if reason != CANCELLED), CANCELLED)
    else:
        ending = ""
    return JobNow(
        end=min(ends, default=None),
        ending=ending,
        lost={} if ending else {record.component: record.why_over for record in over},
        preempted=any(record.preempted for record in records if record.runs),
        is_half_requeued=bool(requeued)
        and any(is_final(record.state) or record not in requeued for record in records),
    )


def _moment(text: str) -> float | None:
    """`2026-12-01T03:40:00`; None for Unknown, None, NONE, N/A, (null), UNLIMITED and the like."""
    try:
        return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return None


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0
