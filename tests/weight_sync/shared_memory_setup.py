"""A trainer and its readers through shared memory, for the tests of it."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
from sync_setup import SPECS, ThreadWorld, ToySource, assert_holds, wait_staged, weights

from llamarl_hpc.channels.messages import SyncMember
from llamarl_hpc.config.schema import WeightSyncConfig
from llamarl_hpc.placement import World
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.weight_sync.base import PublishReceipt
from llamarl_hpc.weight_sync.shared_memory.publisher import SharedMemoryPublisher
from llamarl_hpc.weight_sync.shared_memory.receiver import SharedMemoryReceiver

CONFIG = WeightSyncConfig(timeout_s=10.0, bucket_mb=1)

SHORT = WeightSyncConfig(timeout_s=0.5, bucket_mb=1)

MEMBERS = [
    SyncMember(executor="generator.0"),
    SyncMember(executor="generator.1"),
]


class Trainer:
    """A publisher on each of `size` ranks; ranks are threads."""

    def __init__(
        self,
        run: RunDir,
        *,
        size: int = 1,
        sharded: bool = False,
        config: WeightSyncConfig = CONFIG,
    ) -> None:
        shared: dict[str, object] = {}
        self.sources = [ToySource(rank, size, sharded=sharded) for rank in range(size)]
        self.publishers: list[SharedMemoryPublisher] = [None] * size  # type: ignore[list-item]

        def make(rank: int) -> None:
            world = ThreadWorld(rank, size, shared) if size > 1 else World()
            self.publishers[rank] = SharedMemoryPublisher(
                run=run, config=config, world=world, source=self.sources[rank]
            )

        self.on_all_ranks(make)

    def on_all_ranks(self, call: object) -> None:
        threads = [
            threading.Thread(target=call, args=(rank,))  # type: ignore[arg-type]
            for rank in range(len(self.sources))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)

    def publish(self, version: int, members: list[SyncMember] = MEMBERS) -> PublishReceipt:
        results: list[PublishReceipt | Exception] = [None] * len(self.sources)  # type: ignore[list-item]

        def on_rank(rank: int) -> None:
            self.sources[rank].tensors = weights(version)
            try:
                results[rank] = self.publishers[rank].publish(version, 1, members)
            except Exception as error:
                results[rank] = error

        self.on_all_ranks(on_rank)
        first = results[0]
        if isinstance(first, Exception):
            raise first
        assert all(isinstance(o, PublishReceipt) and o.sent is None for o in results[1:])
        return first

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()


def receiver(
    run: RunDir, number: int = 0, config: WeightSyncConfig = CONFIG
) -> SharedMemoryReceiver:
    return SharedMemoryReceiver(
        run=run, config=config, executor=f"generator.{number}", rank=0, specs=SPECS
    )


def shared_file(run: RunDir) -> Path:
    return Path(msgspec.json.decode((run.weights / "manifest.json").read_bytes())["path"])


def take(reader: SharedMemoryReceiver, version: int) -> str:
    """Receive, compare, release; returns the checksum."""
    reader.start(version, 1, MEMBERS, "")
    staged = wait_staged(reader)
    assert staged.version == version
    assert_holds(staged, version)
    staged.release()
    return staged.checksum
