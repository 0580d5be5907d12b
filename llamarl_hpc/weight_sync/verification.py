"""Which parts of a version are summed, and what two sums that differ are called.

    full      every byte, on both sides
    sampled   one block of BLOCK_BYTES in PERIOD: another one with every version, the same on both
              sides, so that PERIOD versions cover everything
    off       nothing

Sums are kept for each piece of the plan, so a difference names bucket, parameter and sender.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.weight_sync.arena import torch_dtype
from llamarl_hpc.weight_sync.checksum import finish, piece_checksum
from llamarl_hpc.weight_sync.plan import ITEM_BYTES, Arena, Bucket, Piece, Range

Verify = Literal["full", "sampled", "off"]

BLOCK_BYTES = 1 << 20  # of the arena
PERIOD = 16
_MASK = (1 << 64) - 1


def summed_ranges(verify: Verify, version: int, arena: Arena, piece: Piece) -> list[Range]:
    """Elements [start, end) of the piece's parameter that count for this version."""
    if verify == "off":
        return []
    if verify == "full":
        return [(piece.start, piece.end)]
    item, base = ITEM_BYTES[piece.dtype], arena.offsets[piece.name]
    first = (base + piece.start * item) // BLOCK_BYTES
    last = (base + piece.end * item - 1) // BLOCK_BYTES
    ranges = []
    for block in range(first + (version - first) % PERIOD, last + 1, PERIOD):
        start = -(-(block * BLOCK_BYTES - base) // item)
        end = -(-((block + 1) * BLOCK_BYTES - base) // item)
        ranges.append((max(start, piece.start), min(end, piece.end)))
    return [(start, end) for start, end in ranges if start < end]


def piece_sum(verify: Verify, version: int, arena: Arena, piece: Piece, raw: torch.Tensor) -> int:
    """The sum of what counts of a piece; `raw` uint8 [piece.num_bytes] holds it."""
    data = raw.view(torch_dtype(piece.dtype))
    return (
        sum(
            piece_checksum(piece.name, start, data[start - piece.start : end - piece.start])
            for start, end in summed_ranges(verify, version, arena, piece)
        )
        & _MASK
    )


def bucket_sums(
    verify: Verify, version: int, arena: Arena, bucket: Bucket, memory: torch.Tensor
) -> list[int]:
    """One sum for each piece; `memory` is the bucket's own (uint8 [bucket.num_bytes])."""
    return [
        piece_sum(verify, version, arena, piece, memory[piece.offset :][: piece.num_bytes])
        for piece in bucket.pieces
    ]


def checksum_of(verify: Verify, arena: Arena, sums: Sequence[Sequence[int]]) -> str:
    """What is announced and acknowledged; "" when nothing was summed. `sums`: by bucket."""
    if verify == "off":
        return ""
    return finish(arena.specs, (part for bucket in sums for part in bucket))


def difference(number: int, bucket: Bucket, piece: Piece, *, found: int, announced: int) -> str:
    """What an error says of a piece; `number`: the bucket's place in the plan."""
    return (
        f"its checksum of {piece.name}, elements {piece.start}:{piece.end} (bucket {number}, sent "
        f"by trainer rank {bucket.root}) is {found:016x} but the trainer's is {announced:016x}; "
        "the old weights stay in use"
    )


def compare(number: int, bucket: Bucket, *, found: Sequence[int], announced: Sequence[int]) -> None:
    """Raises WeightSyncError that names the first piece whose sums differ."""
    for piece, ours, theirs in zip(bucket.pieces, found, announced, strict=True):
        if ours != theirs:
            raise WeightSyncError(difference(number, bucket, piece, found=ours, announced=theirs))
