"""Job ids in Slurm's tables: `700`, component `700+1`, array `7_3`, `7_[1-5%2]`, step `700+1.0`."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FORM = re.compile(
    r"(?P<job>\d+)(?:\+(?P<component>\d+)|_(?P<array>\d+|\[[\d,\-:%]+\]))?(?:\.(?P<step>\S+))?"
)


@dataclass(frozen=True, kw_only=True)
class JobId:
    """One row's id, taken apart."""

    job: str  # of a heterogeneous job: the leader's, which names the whole job
    component: int | None = None  # None: not a heterogeneous job
    array: str = ""  # "3" or "[1-5%2]"
    step: str = ""  # "0", "batch", "extern"; empty: the row is about the job


def parse_job_id(text: str) -> JobId | None:
    """None for text that is no job id (a header, a rule, an empty line)."""
    match = _FORM.fullmatch(text.strip())
    if match is None:
        return None
    component = match["component"]
    return JobId(
        job=match["job"],
        component=None if component is None else int(component),
        array=match["array"] or "",
        step=match["step"] or "",
    )
