"""Weight sync on one node: the trainer writes into shared memory, generators read it in place.

    trainer rank 0   waits for the readers of the older slot -> lock
    every rank       copies the pieces it holds                          (one memcpy in all)
    trainer rank 0   waits for the others, writes the version -> unlock; training goes on
    every rank       (background) sums what it wrote, piece by piece
    generator rank   (background) waits for the version -> lock; the first one compares the sums
                     for all readers of this memory -> staged
    generator        the engine copies from the slot -> release

Two slots: version v+1 is written while v is still being read; only v+2 waits for the readers of v
(with a deadline that names them). A reader that died holds nothing up, one that starts late reads
the newest version. What is in the slots outlives neither the trainer nor, at the latest, the next
trainer's start on this machine.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

import msgspec
import torch

from llamarl_hpc.channels.messages import SyncMember
from llamarl_hpc.config.schema import WeightSyncConfig
from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.placement import World
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.weight_sync.agreed_plan import agree_on_plan
from llamarl_hpc.weight_sync.arena import copy_piece, torch_dtype
from llamarl_hpc.weight_sync.background import run_in_background
from llamarl_hpc.weight_sync.base import PublishReceipt, Sent, WeightSource
from llamarl_hpc.weight_sync.plan import Piece
from llamarl_hpc.weight_sync.shared_memory.manifest import Manifest, write_manifest
from llamarl_hpc.weight_sync.shared_memory.segment import NUM_SLOTS, Segment, remove_stale
from llamarl_hpc.weight_sync.verification import checksum_of, piece_sum

_POLL_S = 0.001
_CLOSE_S = 5.0
_log = logging.getLogger(__name__)


class SharedMemoryPublisher:
    """On every trainer rank (a `WeightPublisher`). Making one is a collective call."""

    store_address = ""

    def __init__(
        self, *, run: RunDir, config: WeightSyncConfig, world: World, source: WeightSource
    ) -> None:
        self._world, self._source, self._timeout_s = world, source, config.timeout_s
        arena, plan, plan_hash = agree_on_plan(world, source, config.bucket_mb << 20)
        self._layout = Manifest(
            host=socket.gethostname(),
            path="",
            arena=arena,
            buckets=plan,
            plan=plan_hash,
            num_ranks=world.size,
            verify=config.verify,
        )
        self._segment = self._open(run)
        self._mine = [self._pieces(slot) for slot in range(NUM_SLOTS)]
        self._offered: list[set[str]] = [set() for _ in range(NUM_SLOTS)]  # executors, leader only
        self._summed = [_done() for _ in range(NUM_SLOTS)]
        self._serial = 0  # of what was written last

    def publish(self, version: int, epoch: int, members: Sequence[SyncMember]) -> PublishReceipt:
        start = time.monotonic()
        slot, executors = self._serial % NUM_SLOTS, {member.executor for member in members}
        self._summed[slot].wait(self._timeout_s)
        problem = self._claim(slot, executors) if self._world.is_leader else None
        if problem := self._world.share(problem):
            raise WeightSyncError(problem)
        self._serial += 1
        for _, piece, target in self._mine[slot]:
            copy_piece(self._source, piece, target)
        self._segment.set_copied(slot, self._world.rank, self._serial)
        sent: Future[Sent] | None = None
        if self._world.is_leader:
            self._await_copies(slot, version)
            self._segment.set_version(slot, version, self._serial)
            self._segment.unlock_for_writing(slot)
            self._offered[slot] = executors
            sent = Future()
        self._sum_beside(slot, version, sent)
        return PublishReceipt(
            version=version,
            num_bytes=self._layout.arena.num_bytes,
            seconds=time.monotonic() - start,
            sent=sent,
        )

    def close(self) -> None:
        for summed in self._summed:
            summed.wait(_CLOSE_S)
        self._mine = []
        self._segment.close()

    def _pieces(self, slot: int) -> list[tuple[int, Piece, torch.Tensor]]:
        """What this rank writes: number of the piece, piece, its elements in the slot."""
        mapped = self._segment.map_slot(slot, writable=True)
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
        return [
            (number, piece, self._layout.memory_of(memory, piece).view(torch_dtype(piece.dtype)))
            for number, (_, bucket, piece) in enumerate(self._layout.pieces())
            if bucket.root == self._world.rank
        ]

    def _open(self, run: RunDir) -> Segment:
        """The leader makes the file, the others map it; a failure is everybody's."""
        created: Segment | None = None
        problem: Exception | None = None
        if self._world.is_leader:
            try:
                created = _create(run, self._layout)
            except Exception as error:  # the others wait in the broadcast: tell them first
                problem = error
        path, problem = self._world.bcast((created and created.path, problem))
        if problem is not None:
            raise problem
        return created or Segment.attach(path, self._layout.shape)

    def _claim(self, slot: int, executors: set[str]) -> str | None:
        """Wait until nobody needs what is in the slot, and lock it; else say who does."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            needed_by = list(self._segment.slow_readers(slot, self._offered[slot] & executors))
            if not needed_by and self._segment.lock_for_writing(slot):
                self._segment.set_version(slot, -1)
                return None
            if time.monotonic() >= deadline:
                return (
                    f"the weights of version {self._segment.version(slot)} were not taken within "
                    f"{self._timeout_s:g} s by {', '.join(needed_by) or 'a reader'}"
                )
            time.sleep(_POLL_S)

    def _await_copies(self, slot: int, version: int) -> None:
        """Asleep, because a rank that spins takes a core from those that copy."""
        deadline = time.monotonic() + self._timeout_s
        for rank in range(self._world.size):
            while not self._segment.is_copied(slot, rank, self._serial):
                if time.monotonic() >= deadline:
                    raise WeightSyncError(
                        f"trainer rank {rank} did not write its part of version {version} within "
                        f"{self._timeout_s:g} s"
                    )
                time.sleep(_POLL_S)

    # ------------------------------------------------------------------ background thread

    def _sum_beside(self, slot: int, version: int, sent: Future[Sent] | None) -> None:
        layout, segment, serial, rank = self._layout, self._segment, self._serial, self._world.rank
        if layout.verify == "off":
            if sent is not None:
                sent.set_result(Sent(checksum="", share=1.0))
            return
        memory = self._mine[slot]
        summed = self._summed[slot]
        summed.clear()

        def work() -> None:
            try:
                segment.set_sums(
                    slot,
                    rank,
                    serial,
                    {
                        number: piece_sum(layout.verify, version, layout.arena, piece, raw)
                        for number, piece, raw in memory
                    },
                )
            finally:
                summed.set()
            if sent is not None:
                self._announce(slot, serial, sent)

        run_in_background(work, "sums")

    def _announce(self, slot: int, serial: int, sent: Future[Sent]) -> None:
        """Leader: the checksum of the whole version, once all ranks have summed theirs."""
        deadline, ranks = time.monotonic() + self._timeout_s, range(self._world.size)
        while not all(self._segment.is_summed(slot, rank, serial) for rank in ranks):
            if time.monotonic() >= deadline:
                sent.cancel()
                return
            time.sleep(_POLL_S)
        sums = self._segment.sums(slot)
        checksum = checksum_of(self._layout.verify, self._layout.arena, [sums])
        sent.set_result(Sent(checksum=checksum, share=1.0))


def _create(run: RunDir, layout: Manifest) -> Segment:
    """A new file, named in the manifest; what dead trainers left behind is removed first."""
    for path in remove_stale():
        _log.warning("removed %s, which a killed run had left behind", path)
    segment = Segment.create(layout.shape)
    manifest = msgspec.structs.replace(layout, path=str(segment.path))
    write_manifest(run, manifest)
    return segment


def _done() -> threading.Event:
    event = threading.Event()
    event.set()
    return event
