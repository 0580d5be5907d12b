"""An MPI window: memory of one rank of a node that the other ranks of the replica read in place.

    header   serial | state | text | per rank of the node: the serial that it has let go
    arena    a version (weight_sync/plan.py)

Each `start` has a serial on every rank. The first rank of the node writes a version into the arena
and then leaves its result in the header; the others look there. It may write the next one when
every rank has let go of the one before. MPI is called from the main threads only, and only to make
the window, to free it, and for its memory barrier. MPI takes the names of the memory away itself,
so nothing stays behind when a rank is killed.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import numpy as np
import torch

from llamarl_hpc.types import Array
from llamarl_hpc.weight_sync.shared_memory.segment import SHM

_HEADER_BYTES = 1 << 16
_SERIAL, _STATE, _LENGTH, _HANGS, _RANKS = 0, 1, 2, 3, 16  # int64
_TEXT_AT, _TEXT_BYTES = 1 << 15, 1 << 14
_STAGED, _FAILED = 1, 2
_CLOSE_S = 5.0
_POLL_S = 0.001


def shortage(num_bytes: int) -> str | None:
    """Why this node has no room for a window of so many bytes; None if it has. MPI takes it from
    the same place as shared memory of any kind, and a process that writes beyond it dies."""
    if not SHM.is_dir():
        return None
    stats = os.statvfs(SHM)
    free, need = stats.f_bavail * stats.f_frsize, _HEADER_BYTES + num_bytes
    if free >= need:
        return None
    return (
        f"{SHM} of {socket.gethostname()} has {free >> 20:,} MiB free but a window for the weights "
        f"needs {(need >> 20) + 1:,} MiB; enlarge it (mount -o remount, or docker run --shm-size) "
        "or set weight_sync.replica_memory: parts"
    )


class NodeWindow:
    """Making one is a collective call over `node`, a communicator of the ranks of a node."""

    def __init__(self, node: Any, num_bytes: int) -> None:
        from mpi4py import MPI

        assert node.size <= _TEXT_AT // 8 - _RANKS
        self.rank = node.rank
        self._node = node
        size = _HEADER_BYTES + num_bytes if node.rank == 0 else 0
        self._win: Any = MPI.Win.Allocate_shared(size, 1, MPI.INFO_NULL, node)
        raw: Any = self._win.Shared_query(0)[0]
        memory: Array = np.frombuffer(raw, dtype=np.uint8)
        self._words = memory[:_TEXT_AT].view(np.int64)
        self._text = memory[_TEXT_AT : _TEXT_AT + _TEXT_BYTES]
        self.memory = torch.from_numpy(memory[_HEADER_BYTES : _HEADER_BYTES + num_bytes])
        if node.rank == 0:
            self._words[:] = 0
        self._win.Lock_all(MPI.MODE_NOCHECK)
        node.Barrier()
        self._win.Sync()

    def announce(self, serial: int, *, checksum: str = "", problem: str = "") -> None:
        """First rank: what became of fetch `serial`."""
        raw = (problem or checksum).encode()[:_TEXT_BYTES]
        self._text[: len(raw)] = np.frombuffer(raw, dtype=np.uint8)
        self._words[_STATE] = _FAILED if problem else _STAGED
        self._words[_LENGTH] = len(raw)
        self._win.Sync()  # all of it, and the arena, before the serial
        self._words[_SERIAL] = serial
        self._win.Sync()

    def result(self, serial: int) -> tuple[bool, str] | None:
        """(whether it is there; its checksum, or why not); None while it is under way."""
        self._win.Sync()
        if int(self._words[_SERIAL]) != serial:
            return None
        self._win.Sync()
        text = self._text[: int(self._words[_LENGTH])].tobytes().decode(errors="replace")
        return int(self._words[_STATE]) == _STAGED, text

    def let_go(self, serial: int) -> None:
        """This rank reads no version up to this one any more."""
        self._win.Sync()
        self._words[_RANKS + self.rank] = serial

    def is_free(self, serial: int) -> bool:
        """Whether every rank has let go of it. Calls no MPI."""
        return bool((self._words[_RANKS : _RANKS + self._node.size] >= serial).all())

    def free(self, *, hangs: bool = False) -> None:
        """Give the memory back, if all ranks of the node come; one that does not has failed, and
        takes the others with it. `hangs`: something may still write into it, so it stays."""
        if self._win is None:
            return
        if hangs:
            self._words[_HANGS] = 1
        request, deadline = self._node.Ibarrier(), time.monotonic() + _CLOSE_S
        while not request.Test():
            if time.monotonic() >= deadline:
                return
            time.sleep(_POLL_S)
        if self._words[_HANGS]:
            return
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._words = self._text = np.empty(0, dtype=np.uint8)
        self._win.Unlock_all()
        self._win.Free()
        self._win = None
