"""Weights to measure with: made up, laid out as ZeRO leaves them, changed a little by a step."""

from __future__ import annotations

import torch

from llamarl_hpc.types import ParameterSpec
from llamarl_hpc.weight_sync.arena import torch_dtype

EVERY = 200  # one element in so many changes with a step
_INTS = {2: torch.int16, 4: torch.int32}


class MadeUpWeights:
    """A `WeightSource`: what ZeRO would leave on this rank of `size`."""

    def __init__(self, specs: list[ParameterSpec], rank: int, size: int, *, sharded: bool) -> None:
        self.specs, self._rank, self._size, self._sharded = specs, rank, size, sharded
        self._numel = {spec.name: spec.numel for spec in specs}
        self._data: dict[str, torch.Tensor] = {}
        for spec in specs:
            start, end = self.owned_range(spec.name) or (0, spec.numel)
            values = torch.arange(end - start, dtype=torch.float32).sin_()
            self._data[spec.name] = values.to(torch_dtype(spec.dtype))

    def parameter_specs(self) -> list[ParameterSpec]:
        return self.specs

    def owned_range(self, name: str) -> tuple[int, int] | None:
        if not self._sharded:
            return None
        numel = self._numel[name]
        shard = -(-numel // self._size)
        return min(self._rank * shard, numel), min((self._rank + 1) * shard, numel)

    def read(self, name: str, start: int, end: int) -> torch.Tensor:
        first = (self.owned_range(name) or (0, 0))[0]
        return self._data[name][start - first : end - first]

    def step(self, number: int) -> None:
        """Flip the last bit of one element in EVERY, other ones with every `number`."""
        for tensor in self._data.values():
            bits = tensor.view(_INTS[tensor.element_size()])
            bits[number % EVERY :: EVERY] ^= 1

    def parts(self) -> list[torch.Tensor]:
        """What this rank holds; of whole parameters, its share."""
        if self._sharded:
            return list(self._data.values())
        chunks = (tensor.chunk(self._size) for tensor in self._data.values())
        return [c[self._rank] for c in chunks if self._rank < len(c)]
