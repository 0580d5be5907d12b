"""A toy trainer for weight-sync tests: known weights per version, whole or in shards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from llamarl_hpc.channels.messages import SyncMember
from llamarl_hpc.config.schema import WeightSyncConfig
from llamarl_hpc.placement import World
from llamarl_hpc.types import ParameterSpec
from llamarl_hpc.weight_sync.base import PublishReceipt, StagedWeights, WeightReceiver
from llamarl_hpc.weight_sync.collective.publisher import CollectivePublisher
from llamarl_hpc.weight_sync.collective.receiver import CollectiveReceiver

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "embed.weight": ((512, 130), torch.float32),
    "norm.weight": ((130,), torch.float32),
    "layers.0.weight": ((257, 513), torch.bfloat16),
    "layers.1.weight": ((300, 1000), torch.float32),
    "scale": ((1,), torch.float16),
    "bias": ((7,), torch.bfloat16),
}
SPECS = [
    ParameterSpec(name=name, shape=shape, dtype=str(dtype).removeprefix("torch."))
    for name, (shape, dtype) in SHAPES.items()
]


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, (shape, dtype) in SHAPES.items()
    }


class ToySource:
    """A `WeightSource`. With `sharded`, rank r holds what ZeRO-3 would give it: ceil(n / size)
    elements of every parameter, and reading anything else is an error."""

    def __init__(self, rank: int, size: int, *, sharded: bool) -> None:
        self.rank, self.size, self.sharded = rank, size, sharded
        self.tensors = weights(0)

    def parameter_specs(self) -> list[ParameterSpec]:
        return SPECS

    def owned_range(self, name: str) -> tuple[int, int] | None:
        if not self.sharded:
            return None
        numel = self.tensors[name].numel()
        shard = -(-numel // self.size)
        return min(self.rank * shard, numel), min((self.rank + 1) * shard, numel)

    def read(self, name: str, start: int, end: int) -> torch.Tensor:
        held = self.owned_range(name)
        assert held is None or (held[0] <= start and end <= held[1])
        return self.tensors[name].reshape(-1)[start:end]


class ThreadWorld(World):
    """Ranks that are threads of one process; enough of a World for a publisher."""

    def __init__(self, rank: int, size: int, shared: dict[str, Any]) -> None:
        super().__init__(rank=rank, size=size, local_rank=rank, local_size=size)
        object.__setattr__(self, "shared", shared)
        shared.setdefault("barrier", threading.Barrier(size))
        shared.setdefault("values", [None] * size)

    def allgather(self, value: Any) -> list[Any]:
        shared: dict[str, Any] = getattr(self, "shared")  # noqa: B009
        shared["barrier"].wait(20)
        shared["values"][self.rank] = value
        shared["barrier"].wait(20)
        values = list(shared["values"])
        shared["barrier"].wait(20)
        return values

    def bcast(self, value: Any, root: int = 0) -> Any:
        return self.allgather(value)[root]

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        values = self.allgather(value)
        return values if self.rank == root else None

    def share(self, command: Any = None) -> Any:
        return self.allgather(command)[0]

    def maximum(self, values: Any) -> Any:
        return np.maximum.reduce(self.allgather(values))

    def barrier(self) -> None:
        self.allgather(None)


def checksum_of(receipt: PublishReceipt) -> str:
    """What the leader's thread arrives at."""
    assert receipt.sent is not None
    return receipt.sent.result(20).checksum


def wait_staged(receiver: WeightReceiver, timeout_s: float = 20.0) -> StagedWeights:
    done = threading.Event()
    for _ in range(int(timeout_s / 0.005)):
        staged = receiver.poll()
        if staged is not None:
            return staged
        done.wait(0.005)
    raise AssertionError(f"no version staged within {timeout_s} s")


def assert_holds(
    staged: StagedWeights, version: int, tensors: dict[str, torch.Tensor] | None = None
) -> None:
    """`tensors`: other ones than `weights(version)`."""
    expected = weights(version) if tensors is None else tensors
    got = dict(staged.tensors())
    assert list(got) == list(expected)
    for name, tensor in got.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name])


# ------------------------------------------------------------------ over gloo

CONFIG = WeightSyncConfig(timeout_s=15.0, bucket_mb=1)


def members(*numbers: int) -> list[SyncMember]:
    return [SyncMember(executor=f"generator.{number}") for number in numbers]


class Trainer:
    """A publisher on each of `size` ranks; ranks are threads."""

    def __init__(
        self, *, size: int = 1, sharded: bool = False, config: WeightSyncConfig = CONFIG
    ) -> None:
        shared: dict[str, object] = {}
        self.sources = [ToySource(rank, size, sharded=sharded) for rank in range(size)]
        self.publishers: dict[int, CollectivePublisher] = {}

        def make(rank: int) -> None:
            self.publishers[rank] = CollectivePublisher(
                config=config,
                world=ThreadWorld(rank, size, shared) if size > 1 else World(),
                source=self.sources[rank],
                device="cpu",
                source_device="cpu",
                address="127.0.0.1",
            )

        self.on_all_ranks(make)
        self.store_address = self.publishers[0].store_address

    def on_all_ranks(self, call: Callable[[int], None]) -> None:
        threads = [threading.Thread(target=call, args=(r,)) for r in range(len(self.sources))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)

    def publish(
        self,
        version: int,
        to: list[SyncMember],
        epoch: int = 1,
        tensors: dict[str, torch.Tensor] | None = None,
    ) -> PublishReceipt:
        """`tensors`: other ones than `weights(version)`."""
        receipts: dict[int, PublishReceipt] = {}

        def on_rank(rank: int) -> None:
            made = weights(version) if tensors is None else tensors
            self.sources[rank].tensors = {name: tensor.clone() for name, tensor in made.items()}
            receipts[rank] = self.publishers[rank].publish(version, epoch, to)
            for tensor in self.sources[rank].tensors.values():
                tensor.zero_()  # training goes on: the snapshot must not care

        self.on_all_ranks(on_rank)
        assert all((receipt.sent is None) == (rank > 0) for rank, receipt in receipts.items())
        return receipts[0]

    def wait_failure(self, timeout_s: float = 20.0) -> str:
        end = time.monotonic() + timeout_s
        while not self.publishers[0].failure and time.monotonic() < end:
            time.sleep(0.01)
        return self.publishers[0].failure

    def close(self) -> None:
        for publisher in self.publishers.values():
            publisher.close()


def receiver(number: int, config: WeightSyncConfig = CONFIG) -> CollectiveReceiver:
    return CollectiveReceiver(
        config=config,
        executor=f"generator.{number}",
        rank=0,
        device="cpu",
        address="127.0.0.1",
        specs=SPECS,
    )
