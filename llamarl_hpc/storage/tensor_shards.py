"""Flat float32 arrays in pieces: a file per writer, read back in any other cut.

Every rank of a trainer writes the elements it holds; a trainer of another size asks for its own
ranges of the same arrays. Files are safetensors (any reader of that format opens them); the key of
a piece is `<array>:<start>`. Nothing is copied on the way to the disk.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llamarl_hpc.errors import StoreError
from llamarl_hpc.storage import atomic

Floats = NDArray[np.float32]
_NAME = "shard_{:05d}.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Elements [start, start + len(values)) of a flat array."""

    array: str
    start: int
    values: Floats


def shard_path(folder: Path, writer: int) -> Path:
    return folder / _NAME.format(writer)


def write_shard(folder: Path, writer: int, pieces: Sequence[Piece]) -> Path:
    """Write one writer's pieces, durable when this returns. Raises the file system's OSError."""
    header: dict[str, object] = {}
    end = 0
    for piece in pieces:
        assert piece.values.dtype == np.float32 and piece.values.flags.c_contiguous
        start, end = end, end + piece.values.nbytes
        header[f"{piece.array}:{piece.start}"] = {
            "dtype": "F32",
            "shape": [len(piece.values)],
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path = shard_path(folder, writer)
    atomic.write_bytes(
        path, [struct.pack("<Q", len(text)), text, *(piece.values.data for piece in pieces)]
    )
    return path


class ShardReader:
    """All pieces in a folder. Files are mapped, so only what is asked for is read."""

    def __init__(self, folder: Path, num_writers: int) -> None:
        """Raises StoreError when a writer's file is not there or cannot be read."""
        self._folder = folder
        self._pieces: dict[str, list[Piece]] = {}
        for writer in range(num_writers):
            for piece in _pieces_of(shard_path(folder, writer)):
                self._pieces.setdefault(piece.array, []).append(piece)
        for pieces in self._pieces.values():
            pieces.sort(key=lambda piece: piece.start)

    def __contains__(self, array: str) -> bool:
        return array in self._pieces

    def read(self, array: str, start: int, out: Floats) -> None:
        """Fill `out` with elements [start, start + len(out)). Raises StoreError for gaps."""
        at, end = start, start + len(out)
        for piece in self._pieces.get(array, []):
            last = piece.start + len(piece.values)
            if piece.start <= at < last:
                take = min(last, end) - at
                out[at - start : at - start + take] = piece.values[at - piece.start :][:take]
                at += take
        if at < end:
            raise StoreError(
                f"{self._folder} lacks elements {at}:{end} of {array}; take an earlier checkpoint"
            )


def _pieces_of(path: Path) -> list[Piece]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        data = np.memmap(path, dtype=np.uint8, mode="r")[8 + length :]
    except (OSError, ValueError, struct.error) as error:
        raise StoreError(f"cannot read {path}: {error}; take an earlier checkpoint") from error
    pieces = []
    for key, entry in header.items():
        array, _, start = key.rpartition(":")
        first, last = entry["data_offsets"]
        if last > len(data):
            raise StoreError(f"{path} is shorter than it says; take an earlier checkpoint")
        values = data[first:last].view(np.float32)
        pieces.append(Piece(array=array, start=int(start), values=values))
    return pieces
