"""What `llamarl-hpc trainer-memory --measure` and its ranks tell each other."""

from __future__ import annotations

import msgspec


class ProbeTask(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank is told."""

    config: str  # a resolved configuration, file
    model: str  # folder
    answer: str  # file that the leader writes: a list of Peaks, by rank


class Peaks(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that were resident in one rank, at most, until the end of each part."""

    program: int
    step: int
    with_checkpoint: int
