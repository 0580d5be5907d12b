"""What `scontrol --oneliner show partition` prints: one line of `Key=Value` words each."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.slurm_text.time_limit import parse_time


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Limits of one partition; None where there is none."""

    name: str
    state: str = "UP"
    is_default: bool = False
    max_time_s: int | None = None
    max_time: str = ""  # as Slurm writes it
    max_nodes: int | None = None  # of one job; never more than there are
    max_cores_per_node: int | None = None  # of one job


def parse_partitions(text: str) -> dict[str, Partition]:
    """By name; lines that describe none are left out."""
    found = {}
    for line in text.splitlines():
        values = dict(re.findall(r"(\w+)=(\S*)", line))
        if name := values.get("PartitionName"):
            found[name] = Partition(
                name=name,
                state=values.get("State", "UP").upper(),
                is_default=values.get("Default", "").upper() == "YES",
                max_time_s=_time(values.get("MaxTime", "")),
                max_time=values.get("MaxTime", ""),
                max_nodes=_least(values.get("MaxNodes", ""), values.get("TotalNodes", "")),
                max_cores_per_node=_least(values.get("MaxCPUsPerNode", "")),
            )
    return found


def _time(text: str) -> int | None:
    try:
        return parse_time(text)
    except ConfigError:  # a form of a Slurm to come: no limit that we know of
        return None


def _least(*texts: str) -> int | None:
    """0 nodes is what an elastic partition may say of itself."""
    numbers = [int(text) for text in texts if text.isdigit() and int(text)]
    return min(numbers, default=None)
