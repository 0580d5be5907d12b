"""Where buckets arrive at a generator rank, and what becomes of them.

whole   one arena of the model; most buckets arrive straight in their place
parts   in a ring of a few buckets; each is summed whole, then what this rank keeps of it is
        copied into an arena of its parts. The model is never held whole
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from llamarl_hpc.types import TensorPart
from llamarl_hpc.weight_sync.arena import arena_tensors, torch_dtype
from llamarl_hpc.weight_sync.collective.delta import Chart, apply
from llamarl_hpc.weight_sync.collective.group import WINDOW, WINDOW_SMALL
from llamarl_hpc.weight_sync.collective.loads import Broadcast
from llamarl_hpc.weight_sync.collective.rendezvous import Layout
from llamarl_hpc.weight_sync.plan import ALIGNMENT, Arena, Bucket, Piece, arena_start
from llamarl_hpc.weight_sync.targets import Rectangle, parts_arena, rectangles, whole
from llamarl_hpc.weight_sync.verification import bucket_sums, piece_sum


class Landing(Protocol):
    """What a version arrives in; at most `group.Window` allows is under way at a time."""

    arena: Arena  # of `memory`
    memory: torch.Tensor  # uint8 [arena.num_bytes]; what is handed out
    keeps_all: bool  # so that a delta can be applied to it

    def buffer_bytes(self, one: Broadcast) -> int:
        """Memory that it takes until it is taken; 0 if it arrives in its place."""

    def target(self, one: Broadcast) -> torch.Tensor:
        """Where it is to arrive; uint8 [one.num_bytes]."""

    def take(self, one: Broadcast, arrived: torch.Tensor, version: int) -> list[list[int]]:
        """Put it where it belongs; the sums of its buckets' pieces. In the order of `target`."""


class WholeLanding:
    """The arena of the trainer."""

    keeps_all = True

    def __init__(
        self, layout: Layout, device: torch.device, memory: torch.Tensor | None = None
    ) -> None:
        """`memory`: uint8 [layout.arena.num_bytes], if it is not to be this process's own."""
        self.arena, self._layout, self._device = layout.arena, layout, device
        if memory is None:
            memory = torch.empty(self.arena.num_bytes, dtype=torch.uint8, device=device)
        self.memory = memory
        self._scratch: list[torch.Tensor] = []  # for buckets whose pieces do not adjoin

    def buffer_bytes(self, one: Broadcast) -> int:
        in_place = one.delta is None and self._start(one) is not None
        return 0 if in_place else one.num_bytes

    def _start(self, one: Broadcast) -> int | None:
        return arena_start(self.arena, self._layout.buckets[one.buckets[0]])

    def target(self, one: Broadcast) -> torch.Tensor:
        if one.delta is not None:
            return torch.empty(one.num_bytes, dtype=torch.uint8, device=self._device)
        start = self._start(one)
        if start is not None:
            return self.memory[start : start + one.num_bytes]
        if not self._scratch:
            buckets = self._layout.buckets
            size = max(b.num_bytes for b in buckets if arena_start(self.arena, b) is None)
            self._scratch.append(torch.empty(size, dtype=torch.uint8, device=self._device))
        return self._scratch.pop()[: one.num_bytes]

    def take(self, one: Broadcast, arrived: torch.Tensor, version: int) -> list[list[int]]:
        layout = self._layout
        buckets = [layout.buckets[number] for number in one.buckets]
        if one.delta is not None:
            apply(
                one.delta, arrived, Chart(self.arena, buckets, one.delta, self._device), self.memory
            )
        elif self._start(one) is None:
            self._scatter(buckets[0], arrived)
        if layout.verify == "off":
            return [[] for _ in buckets]
        return [
            [piece_sum(layout.verify, version, self.arena, *place) for place in self._places(b)]
            for b in buckets
        ]

    def _scatter(self, bucket: Bucket, arrived: torch.Tensor) -> None:
        for piece, place in self._places(bucket):
            place.copy_(arrived[piece.offset :][: piece.num_bytes])
        buffer = arrived.untyped_storage()
        self._scratch.append(torch.empty(0, dtype=torch.uint8, device=self._device).set_(buffer))

    def _places(self, bucket: Bucket) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Each piece of the bucket and its place in the arena."""
        for piece in bucket.pieces:
            at = self.arena.position(piece.name, piece.dtype, piece.start)
            yield piece, self.memory[at : at + piece.num_bytes]


class PartsLanding:
    """An arena of this rank's parts, and a ring of scratch memory."""

    keeps_all = False

    def __init__(self, layout: Layout, device: torch.device, parts: Sequence[TensorPart]) -> None:
        self.arena, self._layout = parts_arena(layout.arena, parts), layout
        self.memory = torch.empty(self.arena.num_bytes, dtype=torch.uint8, device=device)
        self._flat = {n: t.reshape(-1) for n, t in arena_tensors(self.arena, self.memory)}
        named = {part.name: part for part in parts}
        self._parts = {s.name: named.get(s.name) or whole(s) for s in layout.arena.specs}
        self._ring = Ring(max((b.num_bytes for b in layout.buckets), default=0), device)

    @property
    def num_bytes(self) -> int:
        """All that it takes."""
        return len(self.memory) + len(self._ring.memory)

    def buffer_bytes(self, one: Broadcast) -> int:
        return one.num_bytes

    def target(self, one: Broadcast) -> torch.Tensor:
        assert one.delta is None, "a delta was sent to a rank that holds no version whole"
        return self._ring.take(one.num_bytes)

    def take(self, one: Broadcast, arrived: torch.Tensor, version: int) -> list[list[int]]:
        layout = self._layout
        (number,) = one.buckets
        bucket, sums = layout.buckets[number], []
        if layout.verify != "off":
            sums = bucket_sums(layout.verify, version, layout.arena, bucket, arrived)
        for piece in bucket.pieces:
            raw = arrived[piece.offset :][: piece.num_bytes].view(torch_dtype(piece.dtype))
            for rectangle in rectangles(piece, self._parts[piece.name]):
                _copy(rectangle, raw, self._flat[piece.name])
        return [sums]


class Ring:
    """Memory for what is under way: taken in order, free again in the same order, by itself once
    as much as `group.Window` lets be under way has been taken after it."""

    def __init__(self, largest: int, device: torch.device) -> None:
        """`largest`: bytes taken at a time at most. What does not fit before the end begins at the
        start, which wastes less than that."""
        num_bytes = (WINDOW + 1) * largest + WINDOW_SMALL * ALIGNMENT
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._at = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        if self._at + num_bytes > len(self.memory):
            self._at = 0
        start = self._at
        self._at = -(-(start + num_bytes) // ALIGNMENT) * ALIGNMENT
        return self.memory[start : start + num_bytes]


def _copy(rectangle: Rectangle, source: torch.Tensor, target: torch.Tensor) -> None:
    shape = (rectangle.rows, rectangle.width)
    there = target.as_strided(
        shape, (rectangle.target_stride, 1), target.storage_offset() + rectangle.target
    )
    here = source.as_strided(
        shape, (rectangle.source_stride, 1), source.storage_offset() + rectangle.source
    )
    there.copy_(here)
