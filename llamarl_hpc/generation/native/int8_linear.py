"""A linear layer whose weights stay 8-bit integers in memory (weight only: inputs are not rounded).

    y = (x @ Q^T) * scale + b        Q int8 [rows, inputs], scale float32 [rows]  (models/int8.py)

A block of Q becomes floating point just before it is multiplied; integers up to 127 are exact in
every dtype, so the only rounding is the product's. Because scales belong to rows, a rank that keeps
some columns scales its summand, and ranks add up as they do in full precision.

torch's own weight-only kernel is not used: for float32 on CPUs it is a scalar loop (35 times slower
at 32 rows), on GPUs a thread for every output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import linear

from llamarl_hpc.generation.native.linear import Destination, has_onednn
from llamarl_hpc.models.int8 import SCALE, is_quantised
from llamarl_hpc.types import TensorPart

# Weights that are floating point at a time: on a CPU few enough to be still in its cache when they
# are multiplied.
_CPU_BLOCK, _GPU_BLOCK = 1 << 19, 1 << 27


class Int8Linear:
    """One fused matrix of int8, loaded in place. A row's result depends on no other row wherever
    the kernel's does not: oneDNN's, for float32 on a CPU, from two rows on."""

    def __init__(
        self,
        outputs: dict[str, int],
        inputs: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        total = sum(outputs.values())
        self._outputs = outputs
        self._weight = torch.empty(total, inputs, dtype=torch.int8, device=device)
        self._scale = torch.empty(total, dtype=torch.float32, device=device)
        self._bias = torch.empty(total, dtype=dtype, device=device) if bias else None
        self._by_onednn = device.type == "cpu" and dtype == torch.float32 and has_onednn()
        block = _CPU_BLOCK if device.type == "cpu" else _GPU_BLOCK
        self._block_rows = max(block // inputs, 1)

    def destinations(self) -> dict[str, Destination]:
        found: dict[str, Destination] = {}
        start = 0
        for name, rows in self._outputs.items():
            kept = {"weight": self._weight, f"weight{SCALE}": self._scale}
            if self._bias is not None:
                kept["bias"] = self._bias
            for kind, tensor in kept.items():
                view = tensor[start : start + rows]
                found[f"{name}.{kind}"] = (tuple(view.shape), view.copy_)
            start += rows
        return found

    def __call__(self, x: Tensor) -> Tensor:
        parts = [
            self._product(x, q.to(x.dtype)) for q in torch.split(self._weight, self._block_rows)
        ]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        y.mul_(self._scale)  # in float32, also where y is not
        return y if self._bias is None else y.add_(self._bias)

    def _product(self, x: Tensor, block: Tensor) -> Tensor:
        if not self._by_onednn:
            return linear(x, block)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, block, None, "none", [], "")
        return y


def with_scales(parts: Iterable[TensorPart]) -> Iterator[TensorPart]:
    """The parts that a rank keeps of a quantised model: the scales of the rows that it has."""
    for part in parts:
        yield part
        if is_quantised(part.name, part.shape):
            rows = part.shape[0]
            start, end = (part.start, part.end) if part.dim == 0 else (0, rows)
            yield TensorPart(name=part.name + SCALE, shape=(rows,), start=start, end=end)
