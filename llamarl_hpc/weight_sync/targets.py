"""What a rank of a replica keeps of a version, and what it copies from each piece. Pure.

A rank keeps a part of every tensor: a range of its rows or of its columns. Its parts lie in an
arena of their own, in the order in which the engine names them. A piece is a range of the
flattened tensor, so what a rank needs of it is at most three rectangles:

    columns of the part     . . [x x x] .     .   the piece begins amid a row: what is left of it
    rows of the tensor      . . [x x x] .         whole rows: one rectangle
                            . . [x x  .           it ends amid a row

and one range where the tensor is cut by rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import msgspec

from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.types import ParameterSpec, TensorPart
from llamarl_hpc.weight_sync.plan import Arena, Piece, make_arena


class Rectangle(msgspec.Struct, frozen=True, kw_only=True):
    """Elements to copy: `rows` times `width`, from a piece into the flattened part."""

    source: int  # first element, counted from the piece's first
    source_stride: int  # elements from row to row
    target: int  # first element of the part
    target_stride: int
    rows: int
    width: int


def rectangles(piece: Piece, part: TensorPart) -> list[Rectangle]:
    """What the part takes of a piece of its tensor; none if they do not meet."""
    inner = prod(part.shape[part.dim + 1 :])
    row = part.shape[part.dim] * inner  # elements of what is cut, for each of the dims before
    first, last = part.start * inner, part.end * inner  # of a row that the part has
    found = []
    for number, start, end, rows in row_blocks(piece.start, piece.end, row):
        low, high = max(start, first), min(end, last)
        if low < high:
            found.append(
                Rectangle(
                    source=number * row + low - piece.start,
                    source_stride=row,
                    target=number * (last - first) + low - first,
                    target_stride=last - first,
                    rows=rows,
                    width=high - low,
                )
            )
    return found


def parts_arena(arena: Arena, parts: Sequence[TensorPart]) -> Arena:
    """An arena of the parts, in their order; then the tensors that they do not name, whole.

    Raises WeightSyncError for a part of a tensor that is not sent, or not like that.
    """
    sent = {spec.name: spec for spec in arena.specs}
    kept = []
    for part in parts:
        spec = sent.pop(part.name, None)
        if spec is None:
            raise WeightSyncError(f"the trainer does not send {part.name}, or it is wanted twice")
        if spec.shape != part.shape:
            raise WeightSyncError(
                f"parameter {part.name} is {list(spec.shape)} at the trainer but "
                f"{list(part.shape)} at the generator"
            )
        kept.append(ParameterSpec(name=part.name, shape=part.part_shape, dtype=spec.dtype))
    return make_arena([*kept, *sent.values()])


def whole(spec: ParameterSpec) -> TensorPart:
    """All of a tensor, as a part."""
    shape = spec.shape or (1,)
    return TensorPart(name=spec.name, shape=shape, start=0, end=shape[0])


def check_tiling(parts_of_ranks: Sequence[Sequence[TensorPart]]) -> None:
    """Raises WeightSyncError unless the ranks of a replica keep all of every tensor between them,
    cut along one dim. Ranks may keep the same part, but parts may not overlap otherwise."""
    names = {part.name for parts in parts_of_ranks for part in parts}
    by_rank = [{part.name: part for part in parts} for parts in parts_of_ranks]
    for name in sorted(names):
        cuts: dict[tuple[int, int], int] = {}  # range -> the first rank that keeps it
        for rank, parts in enumerate(by_rank):
            part, other = parts.get(name), next(p[name] for p in by_rank if name in p)
            if part is None or (part.shape, part.dim) != (other.shape, other.dim):
                raise WeightSyncError(
                    f"parameter {name}: rank {rank} of the replica has {_text(part)} where "
                    f"another has {_text(other)}"
                )
            cuts.setdefault((part.start, part.end), rank)
        at = 0
        for (start, end), rank in sorted(cuts.items()):
            if start != at or end <= start:
                raise WeightSyncError(
                    f"parameter {name}: rank {rank} of the replica keeps {start}:{end} of dim "
                    f"{other.dim}, but up to {at} is kept by those before; every element must "
                    "be kept, and ranks may share whole parts only"
                )
            at = end
        if at != other.shape[other.dim]:
            raise WeightSyncError(
                f"parameter {name}: the ranks of the replica keep {at} of the "
                f"{other.shape[other.dim]} of dim {other.dim}"
            )


def row_blocks(start: int, end: int, row: int) -> list[tuple[int, int, int, int]]:
    """Elements start..end of a matrix with rows of `row` elements, as at most three blocks:
    number of the first row, columns from and to, how many rows."""
    first, last = start // row, end // row  # `last` is not complete
    if first == last:
        return [(first, start % row, end % row, 1)]
    blocks = []
    if start % row:
        blocks.append((first, start % row, row, 1))
        first += 1
    if first < last:
        blocks.append((first, 0, row, last - first))
    if end % row:
        blocks.append((last, 0, end % row, 1))
    return blocks


def _text(part: TensorPart | None) -> str:
    return "nothing" if part is None else f"a part of {list(part.shape)} along dim {part.dim}"
