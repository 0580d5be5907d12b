"""The arena as torch sees it: pieces are copied in on one side, whole tensors read on the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.types import ParameterSpec
from llamarl_hpc.weight_sync.base import WeightSource
from llamarl_hpc.weight_sync.plan import Arena, Piece


class StagedArena:
    """A verified version in one block of memory (a `StagedWeights`)."""

    def __init__(
        self,
        *,
        version: int,
        checksum: str,
        arena: Arena,
        memory: torch.Tensor,
        release: Callable[[], None],
    ) -> None:
        self.version, self.checksum = version, checksum
        self._arena, self._memory, self._release = arena, memory, release

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return arena_tensors(self._arena, self._memory)

    def release(self) -> None:
        self._release()


def arena_tensors(arena: Arena, memory: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) in the order of the specs; views of `memory` (uint8 [arena.num_bytes])."""
    for spec in arena.specs:
        dtype = torch_dtype(spec.dtype)
        start = arena.offsets[spec.name]
        raw = memory[start : start + spec.numel * dtype.itemsize]
        yield spec.name, raw.view(dtype).view(spec.shape)


def copy_piece(source: WeightSource, piece: Piece, target: torch.Tensor) -> None:
    """Copy what the trainer holds of a piece into `target` (1-D, of the piece's dtype, maybe
    pinned). From a GPU the copy may still be under way on return."""
    data = source.read(piece.name, piece.start, piece.end)
    if data.dtype != target.dtype or data.shape != target.shape:
        raise WeightSyncError(
            f"parameter {piece.name}, elements {piece.start}:{piece.end}: {target.dtype} was "
            f"announced but the trainer gave {data.dtype} of shape {tuple(data.shape)}"
        )
    target.copy_(data, non_blocking=True)


def check_specs(offered: Sequence[ParameterSpec], expected: Sequence[ParameterSpec]) -> None:
    """Raises WeightSyncError unless both name the same tensors, in whatever order."""
    theirs, ours = ({spec.name: spec for spec in specs} for specs in (offered, expected))
    if missing := [name for name in ours if name not in theirs]:
        raise WeightSyncError(f"the trainer does not send {', '.join(missing[:5])}")
    if surplus := [name for name in theirs if name not in ours]:
        raise WeightSyncError(f"the generator has no {', '.join(surplus[:5])}")
    for name, spec in ours.items():
        other = theirs[name]
        if (other.shape, other.dtype) != (spec.shape, spec.dtype):
            raise WeightSyncError(
                f"parameter {name} is {other.dtype} {list(other.shape)} at the trainer but "
                f"{spec.dtype} {list(spec.shape)} at the generator"
            )


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
