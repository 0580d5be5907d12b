"""Who sends which bytes, computed once from who holds what. Pure; nothing is ever gathered.

All parameters of a version lie in one *arena*, each contiguous and aligned, in the order of the
specs. A plan cuts the arena into pieces, each sent by a trainer rank that holds it, and packs the
pieces of a rank into buckets of bounded size:

    arena     | embed ............ | norm | q_proj ....... | ...
    pieces    | rank 0 | rank 1    | r 1  | rank 1 | r 2   | ...
    buckets   rank 1: [embed 5000:9999, norm 0:64, q_proj 0:700], [...]

Parameters that every rank holds (ZeRO 0-2) are shared out so that all ranks send about the same
number of bytes; shards (ZeRO 3) stay with their owners.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import msgspec

from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.types import ParameterSpec

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}
ALIGNMENT = 64  # bytes; start of every parameter in the arena
GRAIN = 1 << 16  # bytes; where the plan may choose, it cuts parameters at multiples of this

SCATTERED = 1 << 23  # bytes; of a bucket whose pieces do not adjoin, at most

Range = tuple[int, int]  # elements [start, end) of a flattened parameter


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Elements [start, end) of one parameter, and where they lie in their bucket."""

    name: str
    dtype: str
    start: int
    end: int
    offset: int  # bytes from the start of the bucket

    @property
    def num_bytes(self) -> int:
        return (self.end - self.start) * ITEM_BYTES[self.dtype]


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """What travels in one broadcast."""

    root: int  # executor rank of the trainer that sends it
    num_bytes: int  # gaps for alignment included
    pieces: list[Piece]


class Arena(msgspec.Struct, frozen=True, kw_only=True):
    """Where each parameter of a version lies in one block of memory."""

    specs: list[ParameterSpec]
    offsets: dict[str, int]  # name -> bytes from the start
    num_bytes: int

    def position(self, name: str, dtype: str, element: int) -> int:
        """Byte at which an element of a parameter lies."""
        return self.offsets[name] + element * ITEM_BYTES[dtype]


def make_arena(specs: Sequence[ParameterSpec]) -> Arena:
    """Raises WeightSyncError: a name twice, or a dtype that does not travel."""
    offsets: dict[str, int] = {}
    end = 0
    for spec in specs:
        if spec.name in offsets:
            raise WeightSyncError(f"parameter {spec.name} is listed twice")
        if spec.dtype not in ITEM_BYTES:
            raise WeightSyncError(
                f"parameter {spec.name} has dtype {spec.dtype}; weights travel as "
                f"{', '.join(ITEM_BYTES)}"
            )
        offsets[spec.name] = end
        end = _align(end + spec.numel * ITEM_BYTES[spec.dtype])
    return Arena(specs=list(specs), offsets=offsets, num_bytes=end)


def make_plan(
    arena: Arena, owned: Sequence[Mapping[str, Range | None]], bucket_bytes: int
) -> list[Bucket]:
    """Buckets that cover every element once, in the order in which all ranks handle them.

    `owned[rank][name]` is the range that only this rank holds, None where it holds everything.
    A bucket is at most `bucket_bytes` large (but at least GRAIN). Neighbours in the list have
    different roots where possible, so that several ranks send at a time. Raises WeightSyncError
    when the ranges of a parameter do not cover it exactly once.
    """
    pieces = _owned_pieces(arena, owned)
    _share_out(arena, [spec for spec in arena.specs if _is_whole(spec, owned)], pieces)
    limit = max(bucket_bytes // GRAIN, 1) * GRAIN
    by_rank = [_pack(rank, arena, pieces[rank], limit) for rank in range(len(owned))]
    return [bucket for column in zip_longest(*by_rank) for bucket in column if bucket]


def plan_hash(arena: Arena, buckets: Sequence[Bucket]) -> str:
    """Equal where all that travels is: names, types, places, senders, order."""
    return hashlib.blake2b(msgspec.json.encode((arena, buckets)), digest_size=8).hexdigest()


def check_same_plan(hashes: Sequence[str]) -> None:
    """`hashes`: by trainer rank. Raises WeightSyncError where one has another plan than rank 0."""
    others = [f"{rank}" for rank, other in enumerate(hashes) if other != hashes[0]]
    if others:
        raise WeightSyncError(
            f"trainer rank {', '.join(others)} would send by another plan than rank 0: they do not "
            "list the same parameters; nothing was sent"
        )


def arena_start(arena: Arena, bucket: Bucket) -> int | None:
    """The byte of the arena at which the bucket lies as it is; None if its pieces are scattered."""
    starts = {arena.position(p.name, p.dtype, p.start) - p.offset for p in bucket.pieces}
    return starts.pop() if len(starts) == 1 else None


# ------------------------------------------------------------------ who sends what


def _is_whole(spec: ParameterSpec, owned: Sequence[Mapping[str, Range | None]]) -> bool:
    holders = [ranges[spec.name] is None for ranges in owned]
    if any(holders) and not all(holders):
        raise WeightSyncError(
            f"parameter {spec.name} is whole on trainer rank {holders.index(True)} but sharded on "
            f"rank {holders.index(False)}"
        )
    return all(holders)


def _owned_pieces(
    arena: Arena, owned: Sequence[Mapping[str, Range | None]]
) -> list[list[tuple[ParameterSpec, int, int]]]:
    """Per rank, the shards it holds. Checks that the shards of a parameter tile it."""
    pieces: list[list[tuple[ParameterSpec, int, int]]] = [[] for _ in owned]
    for spec in arena.specs:
        if _is_whole(spec, owned):
            continue
        shards = [(*(r[spec.name] or (0, 0)), rank) for rank, r in enumerate(owned)]
        at = 0
        for start, end, rank in sorted(shard for shard in shards if shard[0] < shard[1]):
            if start != at:
                raise WeightSyncError(
                    f"parameter {spec.name}: no rank or two ranks hold elements {min(at, start)}:"
                    f"{max(at, start)} (trainer rank {rank} holds {start}:{end})"
                )
            pieces[rank].append((spec, start, end))
            at = end
        if at != spec.numel:
            raise WeightSyncError(
                f"parameter {spec.name} has {spec.numel} elements but the trainer ranks hold {at}"
            )
    return pieces


def _share_out(
    arena: Arena,
    whole: Sequence[ParameterSpec],
    pieces: list[list[tuple[ParameterSpec, int, int]]],
) -> None:
    """Give the parameters that every rank holds to the ranks that send least so far, in order."""
    num_bytes = [
        sum((end - start) * ITEM_BYTES[spec.dtype] for spec, start, end in rank_pieces)
        for rank_pieces in pieces
    ]
    total = sum(num_bytes) + sum(spec.numel * ITEM_BYTES[spec.dtype] for spec in whole)
    target = -(-total // len(pieces))
    rank = 0
    for spec in whole:
        item, start = ITEM_BYTES[spec.dtype], 0
        while start < spec.numel:
            room = target - num_bytes[rank]
            if room <= 0 and rank + 1 < len(pieces):
                rank += 1
                continue
            end = spec.numel
            if rank + 1 < len(pieces):
                end = min(end, start + -(-room // GRAIN) * GRAIN // item)
            pieces[rank].append((spec, start, end))
            num_bytes[rank] += (end - start) * item
            start = end


def _pack(
    rank: int, arena: Arena, pieces: Sequence[tuple[ParameterSpec, int, int]], limit: int
) -> list[Bucket]:
    """Buckets of at most `limit` bytes, in arena order; what adjoins there adjoins here.

    A receiver writes a bucket that lies in the arena in one piece straight to its place, and copies
    the others twice. Such buckets are of a size that the copy finds in the processor's cache, and
    not of one piece each: a shard of ZeRO-3 has hundreds, and every broadcast costs its handshake.
    """
    buckets: list[Bucket] = []
    packed: list[Piece] = []
    fill, origin = 0, 0  # bytes; where the bucket would start in the arena
    scattered = False

    def close() -> None:
        nonlocal packed, fill, scattered
        if packed:
            buckets.append(Bucket(root=rank, num_bytes=fill, pieces=packed))
        packed, fill, scattered = [], 0, False

    for spec, first, last in sorted(pieces, key=lambda p: (arena.offsets[p[0].name], p[1])):
        item, start = ITEM_BYTES[spec.dtype], first
        while start < last:
            offset, position = _align(fill), arena.position(spec.name, spec.dtype, start)
            origin = origin if packed else position
            scattered = scattered or position - offset != origin
            room = min(limit, SCATTERED) if scattered else limit
            if offset >= room:
                close()
                continue
            end = min(last, start + (room - offset) // item)
            packed.append(
                Piece(name=spec.name, dtype=spec.dtype, start=start, end=end, offset=offset)
            )
            fill = offset + (end - start) * item
            start = end
    close()
    return buckets


def _align(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
