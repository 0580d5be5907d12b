"""Counts per node in Slurm's short form: `72(x2),36`."""

from __future__ import annotations

import re

from llamarl_hpc.errors import ConfigError

_FORM = re.compile(r"(?P<count>\d+)(?:\(x(?P<times>\d+)\))?")


def expand_counts(text: str) -> list[int]:
    """One number a node, in the order of the node list. Raises ConfigError."""
    counts: list[int] = []
    for part in text.split(","):
        match = _FORM.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"'{text}' is not a list of counts such as 72(x2),36")
        counts += [int(match["count"])] * int(match["times"] or 1)
    return counts
