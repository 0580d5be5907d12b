"""What a trainer rank sends, copied so that training can go on; with deltas, the copy before too.

    snapshots   v | v-1      v+1 is copied over v-1, and compared with v

A snapshot is all buckets of this rank, one after the other. The background thread that sends reads
both, so none may be taken before it has ended (`CollectivePublisher.publish` waits for it).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from llamarl_hpc.weight_sync.arena import copy_piece, torch_dtype
from llamarl_hpc.weight_sync.base import WeightSource
from llamarl_hpc.weight_sync.collective.delta import Delta, bucket_starts, encode, word_bytes
from llamarl_hpc.weight_sync.plan import Bucket


class Parcel(msgspec.Struct, frozen=True):
    """What travels at a time: a bucket as it is, or what has changed of some neighbours."""

    buckets: range  # of those of this rank
    data: torch.Tensor
    delta: Delta | None = None


class Snapshot:
    """The buckets of this rank as they were at one version."""

    def __init__(self, buckets: Sequence[Bucket], device: torch.device, *, pinned: bool) -> None:
        self.version = -1  # nothing in it
        self._starts, end = bucket_starts(buckets)
        # zeros: the gaps between pieces are compared too, and must never differ
        self._memory = torch.zeros(end, dtype=torch.uint8, device=device, pin_memory=pinned)
        self.buckets = [
            self._memory[start : start + bucket.num_bytes]
            for start, bucket in zip(self._starts, buckets, strict=True)
        ]
        self._pieces = [
            (piece, buffer[piece.offset :][: piece.num_bytes].view(torch_dtype(piece.dtype)))
            for buffer, bucket in zip(self.buckets, buckets, strict=True)
            for piece in bucket.pieces
        ]
        self._starts.append(end)

    def take(self, source: WeightSource, version: int) -> None:
        """Copy what the trainer holds now; from a GPU the copies may still be under way."""
        self.version = -1
        for piece, target in self._pieces:
            copy_piece(source, piece, target)
        self.version = version

    def neighbours(self, buckets: range) -> torch.Tensor:
        """These buckets and what lies between them."""
        return self._memory[self._starts[buckets.start] : self._starts[buckets.stop]]


class Staging:
    """The newest snapshot and, for deltas, the one before."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        device: torch.device,
        *,
        pinned: bool,
        delta_bytes: int | None,
    ) -> None:
        """`pinned`: the weights leave a GPU by way of the CPU. `delta_bytes`: buckets that are
        small share a delta of so much memory; None without deltas."""
        count = 1 if delta_bytes is None else 2
        self._snapshots = [Snapshot(buckets, device, pinned=pinned) for _ in range(count)]
        self._parts = [
            (part, word_bytes(buckets[part.start : part.stop]))
            for part in _parts([bucket.num_bytes for bucket in buckets], delta_bytes or 0)
        ]

    def take(self, source: WeightSource, version: int) -> None:
        self._snapshots.reverse()
        self._snapshots[0].take(source, version)

    @property
    def buckets(self) -> list[torch.Tensor]:
        """Of the newest snapshot; uint8."""
        return self._snapshots[0].buckets

    def has_base(self, version: int | None) -> bool:
        """Whether the newest snapshot can be sent as a delta from `version`."""
        return len(self._snapshots) == 2 and self._snapshots[1].version == version != -1

    def parcels(self, base: int | None) -> list[Parcel]:
        """All buckets, in order; where it pays, what has changed of them since version `base`."""
        whole = [Parcel(range(n, n + 1), memory) for n, memory in enumerate(self.buckets)]
        if base is None:
            return whole
        assert self.has_base(base)
        new, old = self._snapshots
        parcels: list[Parcel] = []
        for part, size in self._parts:
            found = encode(new.neighbours(part), old.neighbours(part), size)
            if found is None:
                parcels += whole[part.start : part.stop]
            else:
                parcels.append(Parcel(part, found[1], found[0]))
        return parcels


def _parts(sizes: Sequence[int], limit: int) -> list[range]:
    """Neighbours that have at most `limit` bytes together, or one bucket."""
    parts: list[range] = []
    fill = 0
    for number, size in enumerate(sizes):
        if parts and fill + size <= limit:
            parts[-1] = range(parts[-1].start, number + 1)
            fill += size
        else:
            parts.append(range(number, number + 1))
            fill = size
    return parts
