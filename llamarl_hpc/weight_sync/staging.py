"""What a trainer rank sends, copied so that training can go on; with deltas, the copy before too.

    snapshots   v | v-1      v+1 is copied over v-1, and compared with v

A snapshot is one buffer per bucket of this rank. The background thread that sends reads both, so
neither may be taken anew before it has ended (`CollectivePublisher.publish` waits for it).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from llamarl_hpc.weight_sync.arena import copy_piece
from llamarl_hpc.weight_sync.base import WeightSource
from llamarl_hpc.weight_sync.delta import Delta, encode, word_bytes
from llamarl_hpc.weight_sync.plan import ALIGNMENT, Bucket


class Parcel(msgspec.Struct, frozen=True):
    """What travels of one bucket: `data`, which is all of it or (`delta`) what has changed."""

    data: torch.Tensor
    delta: Delta | None = None


class Snapshot:
    """The buckets of this rank as they were at one version."""

    def __init__(self, buckets: Sequence[Bucket], device: torch.device, *, pinned: bool) -> None:
        self.version = -1  # nothing in it
        starts, end = [], 0
        for bucket in buckets:
            starts.append(end)
            end += -(-bucket.num_bytes // ALIGNMENT) * ALIGNMENT
        # zeros: the gaps between pieces are part of a bucket and must never differ
        memory = torch.zeros(end, dtype=torch.uint8, device=device, pin_memory=pinned)
        self.memory = [
            memory[start : start + bucket.num_bytes]
            for start, bucket in zip(starts, buckets, strict=True)
        ]
        self._pieces = [
            (piece, buffer[piece.offset :][: piece.num_bytes])
            for buffer, bucket in zip(self.memory, buckets, strict=True)
            for piece in bucket.pieces
        ]

    def take(self, source: WeightSource, version: int) -> None:
        """Copy what the trainer holds now; from a GPU the copies may still be under way."""
        self.version = -1
        for piece, raw in self._pieces:
            copy_piece(source, piece, raw)
        self.version = version


class Staging:
    """The newest snapshot and, for deltas, the one before."""

    def __init__(
        self, buckets: Sequence[Bucket], device: torch.device, *, pinned: bool, keeps_last: bool
    ) -> None:
        """`pinned`: the weights leave a GPU by way of the CPU. `keeps_last`: for deltas."""
        self._buckets = buckets
        count = 2 if keeps_last else 1
        self._snapshots = [Snapshot(buckets, device, pinned=pinned) for _ in range(count)]

    def take(self, source: WeightSource, version: int) -> None:
        self._snapshots.reverse()
        self._snapshots[0].take(source, version)

    @property
    def memory(self) -> list[torch.Tensor]:
        """The newest snapshot; uint8, one per bucket."""
        return self._snapshots[0].memory

    def has_base(self, version: int | None) -> bool:
        """Whether the newest snapshot can be sent as a delta from `version`."""
        return len(self._snapshots) == 2 and self._snapshots[1].version == version != -1

    def parcels(self, base: int | None) -> list[Parcel]:
        """One for each bucket; where it pays, what has changed since version `base`."""
        if base is None:
            return [Parcel(memory) for memory in self.memory]
        assert self.has_base(base)
        parcels = []
        for bucket, new, old in zip(
            self._buckets, self.memory, self._snapshots[1].memory, strict=True
        ):
            found = encode(new, old, word_bytes(bucket))
            parcels.append(Parcel(new) if found is None else Parcel(found[1], found[0]))
        return parcels
