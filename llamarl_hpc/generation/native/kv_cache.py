"""Keys and values of the running sequences, one slot each, plus one slot for a shared prefix.

One tensor [L layers, 2, S + 1 slots, T tokens, H kv heads, D] whose running slots are always
0..B-1, so that a decoding step reads plain slices of it: `[:B, :longest]`. It grows (rarely, and by
copying) when a longer sequence is admitted. It starts as zeros, because what lies beyond a
sequence's length is masked by adding -inf, and must be finite for that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_GRAIN = 64  # tokens; capacity is a multiple of it


class KVCache:
    """See the module. `max_length` bounds T."""

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        max_length: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.prefix_slot = slots
        self._max_length = -(-max_length // _GRAIN) * _GRAIN
        shape = (layers, 2, slots + 1, 0, kv_heads, head_dim)
        self._data = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def capacity(self) -> int:
        """Tokens that a slot holds at present."""
        return self._data.shape[3]

    def reserve(self, length: int, used_slots: int) -> None:
        """Make room for sequences of `length` tokens, keeping the first `used_slots` slots and
        the prefix slot."""
        old = self.capacity
        if length <= old:
            return
        assert length <= self._max_length
        grown = min(max(length, old + old // 2), self._max_length)
        grown = min(-(-grown // _GRAIN) * _GRAIN, self._max_length)
        shape = (*self._data.shape[:3], grown, *self._data.shape[4:])
        data = torch.zeros(shape, dtype=self._data.dtype, device=self._data.device)
        for kept in (slice(0, used_slots), slice(self.prefix_slot, self.prefix_slot + 1)):
            data[:, :, kept, :old] = self._data[:, :, kept]
        self._data = data

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(keys, values) of a layer, each a view [S + 1, T, H, D]."""
        return self._data[index, 0], self._data[index, 1]

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of slot `source` to all of `targets`, in all layers."""
        if not targets:
            return
        first, last = targets[0], targets[-1] + 1
        tokens = self._data[:, :, source : source + 1, :length]
        if list(targets) == list(range(first, last)):
            self._data[:, :, first:last, :length] = tokens
        else:
            for target in targets:
                self._data[:, :, target : target + 1, :length] = tokens
