"""What `sinfo --noheader --exact --format=%R|%c|%m|%G` prints: kinds of nodes of each partition."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_PLACE = re.compile(r"\([^)]*\)")  # sockets, (null)
FORMAT = "%R|%c|%m|%G"


@dataclass(frozen=True, kw_only=True)
class NodeKind:
    """Nodes that are alike."""

    cores: int  # as Slurm counts CPUs: hardware threads where it knows them
    memory_mib: int
    gpus: dict[str, int] = field(default_factory=dict)  # by type, in small letters; "" without one

    @property
    def num_gpus(self) -> int:
        return sum(self.gpus.values())


def parse_node_kinds(text: str) -> dict[str, list[NodeKind]]:
    """By partition; lines that describe none are left out."""
    found: dict[str, list[NodeKind]] = {}
    for line in text.splitlines():
        name, *values = line.strip().split("|")
        numbers = [value.rstrip("+") for value in values[:2]]
        if len(values) == 3 and all(number.isdigit() for number in numbers):
            kind = NodeKind(
                cores=int(numbers[0]), memory_mib=int(numbers[1]), gpus=_gpus(values[2])
            )
            found.setdefault(name, []).append(kind)
    return found


def _gpus(text: str) -> dict[str, int]:
    """`gpu:a100:4(S:0-1),nvme:1`, `gpu:2`, `(null)`."""
    found: dict[str, int] = {}
    for entry in _PLACE.sub("", text).split(","):
        name, *rest = entry.strip().split(":")
        if name == "gpu":
            count = int(rest.pop()) if rest and rest[-1].isdigit() else 1
            kind = ":".join(rest).lower()
            found[kind] = found.get(kind, 0) + count
    return found
