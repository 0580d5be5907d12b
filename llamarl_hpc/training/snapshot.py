"""One rank's part of a checkpoint: copied in memory first, written to disk by a thread.

    zero/trainer.json              how many ranks wrote, which parameters; comes last
    zero/shard_00000.safetensors   float32 weights and moments that rank 0 held, by parameter name
    zero/rng_00000.pt              its random states

Training goes on as soon as every rank has its copy. Ranks that have written leave a note, because
collectives belong to the main thread; the leader reads the notes of all ranks and reports.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llamarl_hpc.errors import StoreError
from llamarl_hpc.placement import World
from llamarl_hpc.storage import atomic
from llamarl_hpc.storage.tensor_shards import Piece, shard_path, write_shard

log = logging.getLogger(__name__)

FOLDER = "zero"  # within a checkpoint
_DESCRIPTION = "trainer.json"
_POLL_S = 0.02
FORMAT = 2  # 1 was DeepSpeed's own files


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Copies: what happens to the model afterwards does not change them."""

    pieces: list[Piece]
    rng: dict[str, Tensor]
    description: dict[str, Any]  # the same on every rank

    @property
    def num_bytes(self) -> int:
        return sum(piece.values.nbytes for piece in self.pieces)


def rng_file(folder: Path, rank: int) -> Path:
    return folder / f"rng_{rank:05d}.pt"


def read_description(folder: Path) -> dict[str, Any]:
    """What a checkpoint's trainer.json says; `folder` is the checkpoint's `zero`. StoreError
    without it."""
    path = folder / _DESCRIPTION
    try:
        description: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read {path}: {error}; take an earlier checkpoint") from error
    if description.get("format") != FORMAT:
        raise StoreError(
            f"{path} is of format {description.get('format', 1)}, this version reads {FORMAT}; "
            "export the weights with the version that wrote them and start a new run"
        )
    return description


class SnapshotWriter:
    """Writes this rank's snapshots, one at a time. All ranks make the same calls."""

    def __init__(self, world: World, *, timeout_s: float) -> None:
        """`timeout_s`: for the slowest rank, once the leader has written its own part."""
        self._world, self._timeout_s = world, timeout_s
        self._thread: threading.Thread | None = None
        self._error: StoreError | None = None

    def begin(
        self, snapshot: Snapshot, folder: Path, on_done: Callable[[], None] | None = None
    ) -> None:
        """Write below `folder` in a thread. `on_done` is called on the leader, by that thread,
        when the parts of all ranks are on disk. Waits for the snapshot before."""
        self.wait()
        self._thread = threading.Thread(
            target=self._run, args=(snapshot, folder, on_done), name="checkpoint", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raise the StoreError of a write that has failed, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Until nothing is being written (by this rank; on the leader, by any). Raises as
        `check` does."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    # ------------------------------------------------------------------ the thread

    def _run(
        self, snapshot: Snapshot, checkpoint: Path, on_done: Callable[[], None] | None
    ) -> None:
        try:
            self._write(snapshot, checkpoint / FOLDER)
            if self._world.is_leader and on_done is not None:
                on_done()
        except StoreError as error:
            self._error = error
        except Exception as error:
            self._error = StoreError(f"the checkpoint {checkpoint} could not be written: {error!r}")

    def _write(self, snapshot: Snapshot, folder: Path) -> None:
        rank = self._world.rank
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_shard(folder, rank, snapshot.pieces)
            torch.save(snapshot.rng, rng_file(folder, rank))
            atomic.sync_files([rng_file(folder, rank)])
            atomic.write_text(_note(folder, rank), "written")
            if self._world.is_leader:
                self._await_ranks(folder)
                atomic.write_json(folder / _DESCRIPTION, snapshot.description)
        except (OSError, RuntimeError) as error:  # torch has no error of its own for a full disk
            for path in (shard_path(folder, rank), rng_file(folder, rank)):
                path.unlink(missing_ok=True)  # the last words need some space, too
            text = _describe(error, folder, snapshot.num_bytes)  # with the space that was there
            if not self._world.is_leader:
                atomic.write_text(_note(folder, rank), text)
            raise StoreError(text) from error

    def _await_ranks(self, folder: Path) -> None:
        deadline = time.monotonic() + self._timeout_s
        for rank in range(self._world.size):
            note = _note(folder, rank)
            while not note.exists():
                if time.monotonic() > deadline:
                    raise StoreError(
                        f"trainer rank {rank} did not write its part of the checkpoint {folder} "
                        f"within {self._timeout_s:.0f} s"
                    )
                time.sleep(_POLL_S)
            if (text := note.read_text()) != "written":
                raise StoreError(f"trainer rank {rank}: {text}")
        for rank in range(self._world.size):
            _note(folder, rank).unlink()


def _note(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.note"


def _describe(error: Exception, folder: Path, num_bytes: int) -> str:
    where = folder if folder.exists() else folder.parent
    free = f"{_mib(shutil.disk_usage(where).free)} are free" if where.exists() else "nothing is"
    return (
        f"the checkpoint could not be written to {folder}, where {free} for "
        f"{_mib(num_bytes)} ({str(error).splitlines()[0]})"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
