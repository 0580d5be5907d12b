"""The readers' side of weight sync through shared memory; the whole picture is in publisher.py.

background thread   wait for the version -> lock its slot -> compare the sums, or believe the reader
                    that has done so -> staged
main thread         poll -> the engine copies from the slot -> release
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NoReturn

import torch

from llamarl_hpc.channels.messages import SyncMember
from llamarl_hpc.config.schema import WeightSyncConfig
from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.types import ParameterSpec
from llamarl_hpc.weight_sync.arena import StagedArena, check_specs
from llamarl_hpc.weight_sync.background import Fetcher
from llamarl_hpc.weight_sync.base import StagedWeights
from llamarl_hpc.weight_sync.plan import plan_hash
from llamarl_hpc.weight_sync.shared_memory.manifest import Manifest, read_manifest
from llamarl_hpc.weight_sync.shared_memory.segment import NUM_SLOTS, Segment
from llamarl_hpc.weight_sync.verification import checksum_of, difference, piece_sum

_POLL_S = 0.001


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
        self.ranks: tuple[int, ...] = (rank,)
        self._attached: tuple[Segment, Manifest] | None = None
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
        segment, layout = self._attach(version, deadline)
        try:
            slot = self._wait_for(segment, version, deadline)
        finally:
            segment.set_taken(version)
        try:
            checksum = self._verify(segment, layout, slot, version, deadline)
        except WeightSyncError as error:
            segment.unlock_for_reading(slot)
            raise WeightSyncError(f"version {version} at {self._who}: {error}") from error
        return StagedArena(
            version=version,
            checksum=checksum,
            arena=layout.arena,
            memory=self._slots[slot],
            release=lambda: self._release(segment, slot),
        )

    def _verify(
        self, segment: Segment, layout: Manifest, slot: int, version: int, deadline: float
    ) -> str:
        """The checksum of what lies in the slot. One reader sums it, the others believe it: it is
        the same memory."""
        if layout.verify == "off":
            return ""
        serial = segment.serial(slot)
        while (verdict := segment.verdict(slot, serial)) is None:
            if not segment.lock_to_judge(slot):
                self._pause(version, deadline, f"{segment.judge(slot)} to verify version {version}")
                continue
            try:
                if segment.verdict(slot, serial) is None:
                    self._judge(segment, layout, slot, version, deadline)
            finally:
                segment.unlock_to_judge(slot)
        if verdict:
            self._refuse(segment, layout, slot, version, verdict - 1)
        return checksum_of(layout.verify, layout.arena, [segment.sums(slot)])

    def _judge(
        self, segment: Segment, layout: Manifest, slot: int, version: int, deadline: float
    ) -> None:
        """Sum what is there while the trainer ranks do the same, compare, leave the verdict."""
        serial, memory = segment.serial(slot), self._slots[slot]
        found = [
            piece_sum(layout.verify, version, layout.arena, piece, layout.memory_of(memory, piece))
            for _, _, piece in layout.pieces()
        ]
        for rank in range(layout.num_ranks):
            while not segment.is_summed(slot, rank, serial):
                if not segment.is_owned():
                    raise WeightSyncError("the trainer is gone; it had not summed it")
                self._pause(version, deadline, f"trainer rank {rank} to sum version {version}")
        pairs = enumerate(zip(found, segment.sums(slot), strict=True))
        segment.set_verdict(slot, serial, next((n + 1 for n, (a, b) in pairs if a != b), 0))

    def _refuse(
        self, segment: Segment, layout: Manifest, slot: int, version: int, number: int
    ) -> NoReturn:
        """Raise for the piece that the verdict names."""
        place, bucket, piece = next(islice(layout.pieces(), number, None))
        raw = layout.memory_of(self._slots[slot], piece)
        found = piece_sum(layout.verify, version, layout.arena, piece, raw)
        announced = segment.sums(slot)[number]
        raise WeightSyncError(difference(place, bucket, piece, found=found, announced=announced))

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

    def _attach(self, version: int, deadline: float) -> tuple[Segment, Manifest]:
        """The file of a living trainer; what an older attempt left behind is passed over."""
        while self._attached is None:
            manifest = read_manifest(self._run)
            if manifest is not None:
                self._attached = self._open(manifest)
            if self._attached is None:
                self._pause(version, deadline)
        return self._attached

    def _open(self, manifest: Manifest) -> tuple[Segment, Manifest] | None:
        if manifest.host != socket.gethostname():
            raise WeightSyncError(
                f"{self._who} runs on {socket.gethostname()} but the trainer shares its weights "
                f"on {manifest.host}; set weight_sync.transport: collective"
            )
        if (found := plan_hash(manifest.arena, manifest.buckets)) != manifest.plan:
            raise WeightSyncError(
                f"{self._who} would read by plan {found} but the trainer writes by {manifest.plan}"
            )
        try:
            segment = Segment.attach(Path(manifest.path), manifest.shape)
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
        return segment, manifest

    def _pause(self, version: int, deadline: float, what: str = "") -> None:
        if self._fetcher.closing.is_set():
            raise WeightSyncError(f"{self._who} was closed while it waited for version {version}")
        if time.monotonic() >= deadline:
            if what:
                raise WeightSyncError(f"waited in vain for {what}")
            raise WeightSyncError(
                f"the trainer did not publish version {version} within "
                f"{self._config.timeout_s:g} s; {self._who} waited for it"
            )
        time.sleep(_POLL_S)

    @property
    def _who(self) -> str:
        return f"{self._executor} rank {self._rank}"
