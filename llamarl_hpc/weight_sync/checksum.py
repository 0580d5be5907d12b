"""A checksum of a whole version that any split of it adds up to.

    checksum = layout + sum over all 8-byte words of  word * row(name, r) * column(c)   mod 2^64

with word number r * ROW_WORDS + c of its parameter, and odd pseudo-random factors. It is a sum, so
each trainer rank sums what it holds and the sums are added: the result does not depend on the
number of ranks, the buckets, the transport, or the order of anything. Bytes that a rank does not
hold count as zero, so cuts may fall anywhere, even inside a word. Any change of one word shows
(odd factors are invertible); a word in the wrong place, or of another version, shows but for one
case in 2^64. It guards against mistakes and broken memory, not against an adversary.

The arithmetic is plain int64 with wrap-around, so CPU and GPU give the same number; it costs about
as much as reading the memory once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch

from llamarl_hpc.types import Array, ParameterSpec
from llamarl_hpc.weight_sync.plan import GRAIN

ROW_BYTES = GRAIN
ROW_WORDS = ROW_BYTES // 8
_BLOCK_ROWS = 16  # 1 MiB: what is copied or multiplied at a time stays in the cache
_MASK = (1 << 64) - 1


def version_checksum(specs: Sequence[ParameterSpec], tensors: Mapping[str, torch.Tensor]) -> str:
    """The checksum of complete tensors; what every publisher and receiver must arrive at."""
    parts = [piece_checksum(s.name, 0, tensors[s.name].reshape(-1)) for s in specs]
    return finish(specs, parts)


def finish(specs: Sequence[ParameterSpec], parts: Iterable[int]) -> str:
    """The text form of the checksum whose pieces, each element once, have these sums."""
    layout = repr([(s.name, tuple(s.shape), s.dtype) for s in specs])
    return f"{(_digest(layout) + sum(parts)) & _MASK:016x}"


def piece_checksum(name: str, start: int, data: torch.Tensor) -> int:
    """The sum of a piece: `data` (1-D, contiguous) holds elements start.. of parameter `name`."""
    raw = data.view(torch.uint8)
    position = start * data.element_size()
    head = min(-position % ROW_BYTES, len(raw))
    num_rows = (len(raw) - head) // ROW_BYTES
    tail = head + num_rows * ROW_BYTES
    total = _part_of_row(name, position, raw[:head]) + _part_of_row(
        name, position + tail, raw[tail:]
    )
    if num_rows:
        total += _rows(name, (position + head) // ROW_BYTES, raw[head:tail])
    return total & _MASK


# ------------------------------------------------------------------ arithmetic


def _rows(name: str, first_row: int, raw: torch.Tensor) -> int:
    """Sum over whole rows. `raw` uint8 [rows * ROW_BYTES]."""
    num_rows = len(raw) // ROW_BYTES
    factors = _signed(_row_factors(name, first_row, num_rows)).to(raw.device)
    if _is_aligned(raw) and raw.device.type == "cpu":  # numpy's loop is faster than torch's
        words = raw.view(torch.int64).view(-1, ROW_WORDS).numpy()
        sums = np.einsum("ij,j->i", words, _columns().numpy())
        return _wrap(torch.dot(torch.from_numpy(sums), factors))
    columns = _columns().to(raw.device)
    total = 0
    for row in range(0, num_rows, _BLOCK_ROWS):
        block = raw[row * ROW_BYTES : (row + _BLOCK_ROWS) * ROW_BYTES]
        part = (block if _is_aligned(block) else block.clone()).view(torch.int64)
        products = (part.view(-1, ROW_WORDS) * columns).sum(dim=1)
        total += _wrap((products * factors[row : row + _BLOCK_ROWS]).sum())
    return total


def _part_of_row(name: str, position: int, raw: torch.Tensor) -> int:
    """Sum over bytes that all lie within one row, from byte `position` of the parameter."""
    if not len(raw):
        return 0
    offset = position % ROW_BYTES
    padded = torch.zeros(-(-(offset + len(raw)) // 8) * 8, dtype=torch.uint8, device=raw.device)
    padded[offset : offset + len(raw)] = raw
    words = padded.view(torch.int64)
    factor = int(_row_factors(name, position // ROW_BYTES, 1)[0])
    return _wrap((words * _columns().to(raw.device)[: len(words)]).sum()) * factor


def _is_aligned(raw: torch.Tensor) -> bool:
    return raw.data_ptr() % 8 == 0 and raw.storage_offset() % 8 == 0


def _wrap(value: torch.Tensor) -> int:
    return int(value.item()) & _MASK


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _row_factors(name: str, first: int, count: int) -> Array:
    numbers = np.arange(first, first + count, dtype=np.uint64) + np.uint64(_digest(name) >> 1)
    return _scramble(numbers) | np.uint64(1)


@lru_cache(maxsize=1)
def _columns() -> torch.Tensor:
    """int64 [ROW_WORDS]"""
    return _signed(_scramble(np.arange(ROW_WORDS, dtype=np.uint64)) | np.uint64(1))


def _scramble(numbers: Array) -> Array:
    """The splitmix64 generator's output for these states."""
    with np.errstate(over="ignore"):
        z = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(z ^ (z >> np.uint64(31)))


def _signed(numbers: Array) -> torch.Tensor:
    return torch.from_numpy(numbers.view(np.int64))
