"""Weight sync on one node: the trainer writes into shared memory, generators read it in place.

    trainer rank 0   waits for the readers of the older slot -> lock
    every rank       copies the pieces it holds, sums them               (one memcpy in all)
    trainer rank 0   adds the sums, writes version and checksum -> unlock; training goes on
    generator rank   (background) waits for the version -> lock -> sums it -> staged
    generator        the engine copies from the slot -> release

Two slots: version v+1 is written while v is still being read; only v+2 waits for the readers of v
(with a deadline that names them). A reader that died holds nothing up, one that starts late reads
the newest version. What is in the slots outlives neither the trainer nor, at the latest, the next
trainer's start on this machine.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from llamarl_hpc.channels.messages import SyncMember
from llamarl_hpc.config.schema import WeightSyncConfig
from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.placement import World
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.types import ParameterSpec
from llamarl_hpc.weight_sync.arena import (
    StagedArena,
    arena_checksum,
    check_specs,
    copy_piece,
    torch_dtype,
)
from llamarl_hpc.weight_sync.background import Fetcher
from llamarl_hpc.weight_sync.base import PublishReceipt, StagedWeights, WeightSource
from llamarl_hpc.weight_sync.checksum import finish, piece_checksum
from llamarl_hpc.weight_sync.plan import Arena, make_arena, make_plan
from llamarl_hpc.weight_sync.segment import NUM_SLOTS, Segment, remove_stale

_POLL_S = 0.002
_log = logging.getLogger(__name__)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Where receivers find the weights: `weights/manifest.json` in the run folder."""

    host: str
    path: str
    arena: Arena


class SharedMemoryPublisher:
    """On every trainer rank (a `WeightPublisher`). Making one is a collective call."""

    store_address = ""

    def __init__(
        self, *, run: RunDir, config: WeightSyncConfig, world: World, source: WeightSource
    ) -> None:
        self._world, self._source, self._timeout_s = world, source, config.timeout_s
        specs = source.parameter_specs()
        self._arena = make_arena(specs)
        owned = world.allgather({spec.name: source.owned_range(spec.name) for spec in specs})
        plan = make_plan(self._arena, owned, config.bucket_mb << 20)
        self._mine = [bucket for bucket in plan if bucket.root == world.rank]
        self._segment = self._open(run)
        self._slots = [
            torch.frombuffer(self._segment.map_slot(slot, writable=True), dtype=torch.uint8)
            for slot in range(NUM_SLOTS)
        ]
        self._offered: list[set[str]] = [set() for _ in range(NUM_SLOTS)]  # executors, leader only
        self._next = 0

    def publish(self, version: int, epoch: int, members: Sequence[SyncMember]) -> PublishReceipt:
        start = time.monotonic()
        slot, executors = self._next, {member.executor for member in members}
        problem = self._claim(slot, executors) if self._world.is_leader else None
        if problem := self._world.bcast(problem):
            raise WeightSyncError(problem)
        parts = self._world.gather(self._write(slot))
        checksum = ""
        if parts is not None:
            checksum = finish(self._arena.specs, parts)
            self._segment.set_version(slot, version, checksum)
            self._segment.unlock_for_writing(slot)
            self._offered[slot] = executors
        self._next = (slot + 1) % NUM_SLOTS
        return PublishReceipt(
            version=version,
            checksum=self._world.bcast(checksum),
            num_bytes=self._arena.num_bytes,
            seconds=time.monotonic() - start,
        )

    def close(self) -> None:
        self._slots = []
        self._segment.close()

    def _open(self, run: RunDir) -> Segment:
        """The leader makes the file, the others map it; a failure is everybody's."""
        created: Segment | None = None
        problem: Exception | None = None
        if self._world.is_leader:
            try:
                created = _create(run, self._arena)
            except Exception as error:  # the others wait in the broadcast: tell them first
                problem = error
        path, problem = self._world.bcast((created and created.path, problem))
        if problem is not None:
            raise problem
        return created or Segment.attach(path, self._arena.num_bytes)

    def _claim(self, slot: int, executors: set[str]) -> str | None:
        """Wait until nobody needs what is in the slot, and lock it; else say who does."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            needed_by = list(self._segment.slow_readers(slot, self._offered[slot] & executors))
            if not needed_by and self._segment.lock_for_writing(slot):
                self._segment.set_version(slot, -1, "")
                return None
            if time.monotonic() >= deadline:
                return (
                    f"the weights of version {self._segment.version(slot)} were not taken within "
                    f"{self._timeout_s:g} s by {', '.join(needed_by) or 'a reader'}"
                )
            time.sleep(_POLL_S)

    def _write(self, slot: int) -> int:
        """Copy this rank's pieces into the slot; returns their sum."""
        total = 0
        for bucket in self._mine:
            for piece in bucket.pieces:
                at = self._arena.position(piece.name, piece.dtype, piece.start)
                raw = self._slots[slot][at : at + piece.num_bytes]
                copy_piece(self._source, piece, raw)
                total += piece_checksum(piece.name, piece.start, raw.view(torch_dtype(piece.dtype)))
        return total


def _create(run: RunDir, arena: Arena) -> Segment:
    """A new file, named in the manifest; what dead trainers left behind is removed first."""
    for path in remove_stale():
        _log.warning("removed %s, which a killed run had left behind", path)
    segment = Segment.create(arena.num_bytes)
    manifest = Manifest(host=socket.gethostname(), path=str(segment.path), arena=arena)
    run.weights.mkdir(exist_ok=True)
    beside = run.weights / f".manifest.{secrets.token_hex(4)}"
    beside.write_bytes(msgspec.json.encode(manifest))
    os.replace(beside, _manifest(run))
    return segment


def _manifest(run: RunDir) -> Path:
    return run.weights / "manifest.json"


class SharedMemoryReceiver:
    """On every generator rank (a `WeightReceiver`). Finds the trainer's file at the first fetch.

    `specs`, if given, are the tensors that the generator needs; others are refused.
    """

    def __init__(
        self,
        *,
        run: RunDir,
        config: WeightSyncConfig,
        executor: str,
        rank: int,
        specs: Sequence[ParameterSpec] | None = None,
    ) -> None:
        self._run, self._config, self._specs = run, config, specs
        self._executor, self._rank = executor, rank
        self._attached: tuple[Segment, Arena] | None = None
        self._slots: list[torch.Tensor] = []
        self._fetcher = Fetcher()

    def start(
        self, version: int, epoch: int, members: Sequence[SyncMember], store_address: str
    ) -> None:
        self._fetcher.submit(lambda: self._fetch(version))

    def poll(self) -> StagedWeights | None:
        return self._fetcher.poll()

    def close(self) -> None:
        self._fetcher.close()
        self._slots = []
        if self._attached is not None:
            self._attached[0].close()

    # ------------------------------------------------------------------ background thread

    def _fetch(self, version: int) -> StagedWeights:
        deadline = time.monotonic() + self._config.timeout_s
        segment, arena = self._attach(version, deadline)
        try:
            slot = self._wait_for(segment, version, deadline)
        finally:
            segment.set_taken(version)
        staged = StagedArena(
            version=version,
            checksum=segment.checksum(slot),
            arena=arena,
            memory=self._slots[slot],
            release=lambda: self._release(segment, slot),
        )
        if self._config.verify:
            found = arena_checksum(arena, self._slots[slot])
            if found != staged.checksum:
                segment.unlock_for_reading(slot)
                raise WeightSyncError(
                    f"version {version} at {self._who}: its checksum is {found} but the trainer's "
                    f"is {staged.checksum}; the old weights stay in use"
                )
        return staged

    def _release(self, segment: Segment, slot: int) -> None:
        segment.unlock_for_reading(slot)
        self._fetcher.released()

    def _wait_for(self, segment: Segment, version: int, deadline: float) -> int:
        """The slot that holds `version`, locked for reading."""
        while True:
            versions = [segment.version(slot) for slot in range(NUM_SLOTS)]
            if version in versions:
                slot = versions.index(version)
                if segment.lock_for_reading(slot):
                    if segment.version(slot) == version:
                        return slot
                    segment.unlock_for_reading(slot)
            elif max(versions) > version:
                raise WeightSyncError(
                    f"version {version} came too late to {self._who}: it has been replaced by "
                    f"version {max(versions)}"
                )
            elif not segment.is_owned():
                raise WeightSyncError(f"the trainer is gone; {self._who} waited for its weights")
            self._pause(version, deadline)

    def _attach(self, version: int, deadline: float) -> tuple[Segment, Arena]:
        """The file of a living trainer; what an older attempt left behind is passed over."""
        while self._attached is None:
            manifest = _read_manifest(self._run)
            if manifest is not None:
                self._attached = self._open(manifest)
            if self._attached is None:
                self._pause(version, deadline)
        return self._attached

    def _open(self, manifest: Manifest) -> tuple[Segment, Arena] | None:
        if manifest.host != socket.gethostname():
            raise WeightSyncError(
                f"{self._who} runs on {socket.gethostname()} but the trainer shares its weights "
                f"on {manifest.host}; set weight_sync.transport: collective"
            )
        try:
            segment = Segment.attach(Path(manifest.path), manifest.arena.num_bytes)
        except FileNotFoundError:
            return None
        if not segment.is_owned():
            segment.close()
            return None
        if self._specs is not None:
            check_specs(manifest.arena.specs, self._specs)
        segment.register(self._executor, self._rank)
        self._slots = [
            torch.frombuffer(segment.map_slot(slot, writable=False), dtype=torch.uint8)
            for slot in range(NUM_SLOTS)
        ]
        return segment, manifest.arena

    def _pause(self, version: int, deadline: float) -> None:
        if self._fetcher.closing.is_set():
            raise WeightSyncError(f"{self._who} was closed while it waited for version {version}")
        if time.monotonic() >= deadline:
            raise WeightSyncError(
                f"the trainer did not publish version {version} within "
                f"{self._config.timeout_s:g} s; {self._who} waited for it"
            )
        time.sleep(_POLL_S)

    @property
    def _who(self) -> str:
        return f"{self._executor} rank {self._rank}"


def _read_manifest(run: RunDir) -> Manifest | None:
    try:
        return msgspec.json.decode(_manifest(run).read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise WeightSyncError(f"{_manifest(run)} cannot be read: {error}") from error
