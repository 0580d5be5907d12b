"""Amounts of memory as Slurm writes them; units are powers of 1024."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from llamarl_hpc.errors import ConfigError

_FORM = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGTP]?)(?:i?B)?(?P<per>[nc]?)", re.I)
_MIB = {"K": 2.0**-10, "": 1.0, "M": 1.0, "G": 2.0**10, "T": 2.0**20, "P": 2.0**30}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """An amount; 0 MiB stands for all the memory of a node."""

    mib: float
    per: Literal["node", "cpu", ""] = ""  # sacct's old suffixes n and c; empty: not said


def parse_memory(text: str) -> Memory | None:
    """`64G`, `1.5g`, `512K`, `2000` (MiB), `4Gn`; None for what Slurm prints when it does not know.

    Raises ConfigError.
    """
    if text.strip() in ("", "?"):
        return None
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"'{text}' is not an amount of memory; wanted one such as 64G or 4000M")
    per: Literal["node", "cpu", ""] = (
        "node" if match["per"].lower() == "n" else "cpu" if match["per"] else ""
    )
    return Memory(mib=float(match["number"]) * _MIB[match["unit"].upper()], per=per)


def format_memory(memory: Memory) -> str:
    """Whole MiB, rounded up: `512K` becomes `1M` and never 0, which means all of a node."""
    return f"{-int(-memory.mib // 1)}M" if memory.mib else "0"
