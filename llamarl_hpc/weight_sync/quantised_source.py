"""What the trainer sends when generators are quantised (`generator.quantization`).

    X.weight  bfloat16 or float32   ->   X.weight  int8,  X.weight_scale  float32 [rows]

Each rank quantises what it holds, piece by piece, while it copies the piece to where it leaves
from; no rank gathers a matrix. A rank of ZeRO-3 owns a flat range that may begin and end amid a
row, whose scale then follows from several ranks: the largest elements of such rows are agreed on
before a version is read, in one reduction of a few numbers (at most one a matrix and rank). A scale
is sent by the rank that holds its row's first element. All bytes are those of the gathered matrix.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from llamarl_hpc.channels.messages import SyncMember
from llamarl_hpc.models.int8 import (
    SCALE,
    is_quantised,
    largest_of_rows,
    quantise_rows,
    row_scales,
)
from llamarl_hpc.placement import World
from llamarl_hpc.types import ParameterSpec
from llamarl_hpc.weight_sync.base import PublishReceipt, WeightPublisher, WeightSource
from llamarl_hpc.weight_sync.plan import Range
from llamarl_hpc.weight_sync.targets import row_blocks

_CHUNK_NUMEL = (
    1 << 22
)  # read from the trainer at a time: with LoRA each chunk is merged, in float32


class QuantisedSource:
    """A `WeightSource` over the trainer's own. Making one and `measure` are collective calls."""

    def __init__(self, source: WeightSource, world: World) -> None:
        self._source, self._world = source, world
        specs = source.parameter_specs()
        self._matrices = {s.name: s for s in specs if is_quantised(s.name, s.shape)}
        self._specs = [sent for spec in specs for sent in self._sent_for(spec)]
        owned = world.allgather({name: source.owned_range(name) for name in self._matrices})
        self._cut = [
            (name, row)
            for name, spec in self._matrices.items()
            for row in _cut_rows([ranges[name] for ranges in owned], spec.shape[1])
        ]
        self._agreed: dict[str, dict[int, float]] = {}  # matrix -> cut row -> its largest element
        self._scales: dict[str, torch.Tensor] = {}  # of the rows that this rank has a part of

    def measure(self) -> None:
        """To be called by every rank before a version is read."""
        self._scales.clear()
        if not self._cut:
            return
        largest = [self._largest_held(name, row) for name, row in self._cut]
        mine = np.zeros(len(largest), dtype=np.float32)
        held = [n for n, value in enumerate(largest) if value is not None]
        if held:  # one transfer from a GPU
            values = [value for value in largest if value is not None]
            mine[held] = torch.stack(values).cpu().numpy()
        agreed = self._world.maximum(mine)
        self._agreed = {name: {} for name, _ in self._cut}
        for (name, row), value in zip(self._cut, agreed.tolist(), strict=True):
            self._agreed[name][row] = value

    # ------------------------------------------------------------------ WeightSource

    def parameter_specs(self) -> list[ParameterSpec]:
        return self._specs

    def owned_range(self, name: str) -> Range | None:
        """Of scales: the rows that begin in what this rank owns of the matrix."""
        matrix = self._matrix_of(name)
        if matrix is None:
            return self._source.owned_range(name)
        held, width = self._source.owned_range(matrix.name), matrix.shape[1]
        return None if held is None else (-(-held[0] // width), -(-held[1] // width))

    def read(self, name: str, start: int, end: int) -> torch.Tensor:
        matrix = self._matrix_of(name)
        if matrix is not None:
            first = self._held_rows(matrix)[0]
            return self._scales_of(matrix)[start - first : end - first]
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._source.read(name, start, end)
        scales, first = self._scales_of(matrix), self._held_rows(matrix)[0]
        found = torch.empty(end - start, dtype=torch.int8, device=scales.device)
        at = 0
        for row, block in self._blocks(matrix, start, end):
            quantised = quantise_rows(block, scales[row - first :][: len(block)])
            found[at : at + block.numel()] = quantised.view(-1)
            at += block.numel()
        return found

    # ------------------------------------------------------------------ rows and their scales

    @staticmethod
    def _sent_for(spec: ParameterSpec) -> list[ParameterSpec]:
        if not is_quantised(spec.name, spec.shape):
            return [spec]
        return [
            ParameterSpec(name=spec.name, shape=spec.shape, dtype="int8"),
            ParameterSpec(name=spec.name + SCALE, shape=spec.shape[:1], dtype="float32"),
        ]

    def _matrix_of(self, name: str) -> ParameterSpec | None:
        """The matrix whose scales are called `name`."""
        return self._matrices.get(name.removesuffix(SCALE)) if name.endswith(SCALE) else None

    def _held(self, matrix: ParameterSpec) -> Range:
        return self._source.owned_range(matrix.name) or (0, matrix.numel)

    def _held_rows(self, matrix: ParameterSpec) -> Range:
        """Rows of which this rank holds an element."""
        (start, end), width = self._held(matrix), matrix.shape[1]
        return start // width, -(-end // width)

    def _largest_held(self, name: str, row: int) -> torch.Tensor | None:
        """float32 []: of what this rank holds of a row; None if that is nothing."""
        matrix = self._matrices[name]
        (start, end), width = self._held(matrix), matrix.shape[1]
        start, end = max(start, row * width), min(end, (row + 1) * width)
        if start >= end:
            return None
        return largest_of_rows(self._source.read(name, start, end).view(1, -1))[0].float()

    def _scales_of(self, matrix: ParameterSpec) -> torch.Tensor:
        """float32, of `_held_rows`; made when first asked for, kept until the next `measure`."""
        if matrix.name not in self._scales:
            first, last = self._held_rows(matrix)
            parts = [
                (row, largest_of_rows(block).float())
                for row, block in self._blocks(matrix, *self._held(matrix))
            ]
            largest = torch.cat([part for _, part in parts])
            for row, value in self._agreed.get(matrix.name, {}).items():
                if first <= row < last:
                    largest[row - first] = value
            self._scales[matrix.name] = row_scales(largest)
        return self._scales[matrix.name]

    def _blocks(
        self, matrix: ParameterSpec, start: int, end: int
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Elements start..end in chunks, each of whole rows or a part of one: (row, [rows, n])."""
        width = matrix.shape[1]
        num = max(_CHUNK_NUMEL // width, 1)
        for row, first, last, rows in row_blocks(start, end, width):
            for part in range(row, row + rows, num):
                count = min(num, row + rows - part)
                at, size = part * width + first, count * (last - first)
                yield part, self._source.read(matrix.name, at, at + size).view(count, -1)


def _cut_rows(ranges: Sequence[Range | None], width: int) -> list[int]:
    """Rows that lie on several ranks."""
    starts = {held[0] for held in ranges if held is not None and held[0] < held[1]}
    return sorted({start // width for start in starts if start % width})


class QuantisingPublisher:
    """A `WeightPublisher` that measures before it publishes."""

    def __init__(self, source: QuantisedSource, publisher: WeightPublisher) -> None:
        """`publisher` reads from `source`."""
        self._source, self._publisher = source, publisher
        self.store_address = publisher.store_address

    def publish(self, version: int, epoch: int, members: Sequence[SyncMember]) -> PublishReceipt:
        start = time.monotonic()
        self._source.measure()
        receipt = self._publisher.publish(version, epoch, members)
        return replace(receipt, seconds=time.monotonic() - start)

    def close(self) -> None:
        self._publisher.close()
