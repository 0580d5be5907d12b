"""What a trainer that shares its memory tells the readers: `weights/manifest.json` of the run."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.weight_sync.plan import Arena, Bucket, Piece
from llamarl_hpc.weight_sync.shared_memory.segment import Shape
from llamarl_hpc.weight_sync.verification import Verify


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Where the weights lie, and how they are cut up."""

    host: str
    path: str
    arena: Arena
    buckets: list[Bucket]
    plan: str  # hash of arena and buckets
    num_ranks: int  # of the trainer
    verify: Verify

    @property
    def shape(self) -> Shape:
        return Shape(
            num_bytes=self.arena.num_bytes,
            num_ranks=self.num_ranks,
            num_pieces=sum(len(bucket.pieces) for bucket in self.buckets),
        )

    def pieces(self) -> Iterator[tuple[int, Bucket, Piece]]:
        """(number of the bucket, bucket, piece), in the order of the plan."""
        for number, bucket in enumerate(self.buckets):
            for piece in bucket.pieces:
                yield number, bucket, piece

    def memory_of(self, slot: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Where a piece lies in a slot; uint8 [piece.num_bytes]."""
        at = self.arena.position(piece.name, piece.dtype, piece.start)
        return slot[at : at + piece.num_bytes]


def write_manifest(run: RunDir, manifest: Manifest) -> None:
    """Replaces the one of an older attempt."""
    run.weights.mkdir(exist_ok=True)
    beside = run.weights / f".manifest.{secrets.token_hex(4)}"
    beside.write_bytes(msgspec.json.encode(manifest))
    os.replace(beside, _path(run))


def read_manifest(run: RunDir) -> Manifest | None:
    """None while no trainer has written one. Raises WeightSyncError."""
    try:
        return msgspec.json.decode(_path(run).read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise WeightSyncError(f"{_path(run)} cannot be read: {error}") from error


def _path(run: RunDir) -> Path:
    return run.weights / "manifest.json"
