"""Matrices as 8-bit integers with one scale per output row: what `generator.quantization: int8` is.

    X.weight        int8 [rows, columns]    round(w / scale), to even, in [-127, 127]
    X.weight_scale  float32 [rows]          largest |w| of the row / 127

Symmetric, so zero stays zero. Only the matrices of the decoder's layers: embedding and output
matrix (one tensor in a tied model) make up little of a large model and cost the most accuracy;
norms and biases are small. All arithmetic is elementwise in float32, so trainer and generator, CPU
and GPU, a whole matrix and any slice of it give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

LARGEST = 127
SCALE = "_scale"  # after the name of a quantised matrix
_FULL = ("model.embed_tokens.", "lm_head.")
_TINY = torch.finfo(torch.float32).tiny
# Elements whose float32 copies are held at a time: few stay in a CPU's cache, many keep a GPU busy
_CPU_BLOCK, _GPU_BLOCK = 1 << 18, 1 << 25


def is_quantised(name: str, shape: Sequence[int]) -> bool:
    """Whether this weight of a Hugging Face model becomes int8."""
    return len(shape) == 2 and name.endswith(".weight") and not name.startswith(_FULL)


def row_scales(largest: Tensor) -> Tensor:
    """float32 [rows], given the largest absolute value of every row.

    1 where that is 0, or so small that its scale would not be a normal number: such a row is
    all zeros.
    """
    scales = largest.float() / LARGEST
    return torch.where(scales < _TINY, 1.0, scales)


@torch.no_grad()
def largest_of_rows(matrix: Tensor) -> Tensor:
    """[rows], in the matrix's dtype. 0 for a matrix without columns."""
    if not matrix.shape[1]:
        return matrix.new_zeros(len(matrix))
    return torch.maximum(matrix.amax(dim=1), -matrix.amin(dim=1))


@torch.no_grad()
def quantise_rows(matrix: Tensor, scales: Tensor) -> Tensor:
    """int8 [rows, columns]; `matrix` may be any columns of its rows, `scales` [rows] is theirs."""
    found = torch.empty(matrix.shape, dtype=torch.int8, device=matrix.device)
    block = _CPU_BLOCK if matrix.device.type == "cpu" else _GPU_BLOCK
    num = max(block // max(matrix.shape[1], 1), 1)
    for start in range(0, len(matrix), num):
        rows = slice(start, start + num)
        quotients = matrix[rows] / scales[rows].unsqueeze(1)
        found[rows] = quotients.round_().clamp_(-LARGEST, LARGEST)
    return found


def quantised(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same tensors, one at a time; a matrix as its int8 elements and its scales."""
    for name, tensor in tensors:
        if not is_quantised(name, tensor.shape):
            yield name, tensor
            continue
        scales = row_scales(largest_of_rows(tensor))
        yield name, quantise_rows(tensor, scales)
        yield name + SCALE, scales
