"""Which transport is taken, and that receivers follow the trainer's choice."""

from __future__ import annotations

from pathlib import Path

import pytest
from sync_setup import SPECS, ToySource, assert_holds, wait_staged, weights

from llamarl_hpc.channels.messages import SyncMember
from llamarl_hpc.config.schema import Config, ResourceConfig, ResourcesConfig, WeightSyncConfig
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.placement import World
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.weight_sync import select
from llamarl_hpc.weight_sync.collective.publisher import CollectivePublisher
from llamarl_hpc.weight_sync.select import make_publisher, make_receiver
from llamarl_hpc.weight_sync.shared_memory import segment
from llamarl_hpc.weight_sync.shared_memory.publisher import SharedMemoryPublisher

SOURCE = ToySource(0, 1, sharded=False)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create_at(tmp_path / "run")


def config(transport: str = "auto", **generator: object) -> Config:
    return Config(
        weight_sync=WeightSyncConfig(transport=transport, timeout_s=20),
        resources=ResourcesConfig(generator=ResourceConfig(**generator)),
    )


def chosen(run: RunDir, config: Config) -> type:
    publisher = make_publisher(run, config, World(), SOURCE, "cpu")
    publisher.close()
    return type(publisher)


def test_shared_memory_is_taken_on_one_host_and_the_network_otherwise(run: RunDir) -> None:
    assert chosen(run, config()) is SharedMemoryPublisher
    assert chosen(run, config("collective")) is CollectivePublisher
    assert chosen(run, config(nodes=2)) is CollectivePublisher
    assert chosen(run, config(partition="gpu")) is CollectivePublisher


def test_auto_does_without_shared_memory_that_is_too_small(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stats:
        f_bavail, f_frsize = 16, 4096

    monkeypatch.setattr(segment.os, "statvfs", lambda path: Stats)
    assert chosen(run, config()) is CollectivePublisher
    with pytest.raises(ConfigError, match="collective"):
        make_publisher(run, config("shared_memory"), World(), SOURCE, "cpu")


def test_gpus_on_both_sides_take_nccl_and_on_one_side_gloo() -> None:
    gpus = ResourceConfig(gpus_per_node=4)
    both = Config(resources=ResourcesConfig(trainer=gpus, generator=gpus))
    one = Config(resources=ResourcesConfig(trainer=gpus))
    assert select._transfer_device(both, "cuda") == "cuda"
    assert select._transfer_device(one, "cuda") == "cpu"
    assert select._transfer_device(one, "cpu") == "cpu"
    assert select._transfer_device(Config(), "cpu") == "cpu"


@pytest.mark.parametrize("transport", ["shared_memory", "collective"])
def test_receivers_follow_the_trainers_address(run: RunDir, transport: str) -> None:
    members = [SyncMember(executor="generator.0")]
    source = ToySource(0, 1, sharded=False)
    publisher = make_publisher(run, config(transport), World(), source, "cpu")
    assert bool(publisher.store_address) == (transport == "collective")
    receiver = make_receiver(run, config(), "generator.0", World(), "cpu", SPECS)
    assert receiver.poll() is None
    receiver.start(5, 1, members, publisher.store_address)
    source.tensors = weights(5)
    publisher.publish(5, 1, members)
    assert_holds(wait_staged(receiver), 5)
    receiver.close()
    receiver.close()
    publisher.close()
    publisher.close()


class TwoNodes(World):
    """Rank 1 of a replica of four on two nodes."""

    def __init__(self) -> None:
        super().__init__(rank=1, size=4, local_rank=1, local_size=2)

    def allgather(self, value: object) -> list[object]:
        return [not value, value] * 2


def test_one_rank_of_a_node_fetches_where_memory_is_shared_else_every_rank(run: RunDir) -> None:
    def ranks(config: Config, device: str = "cpu", world: World | None = None) -> tuple[int, ...]:
        return make_receiver(run, config, "generator.0", world or TwoNodes(), device).ranks

    gpus = ResourceConfig(gpus_per_node=2)
    on_gpus = Config(resources=ResourcesConfig(trainer=gpus, generator=gpus))
    parts = Config(weight_sync=WeightSyncConfig(replica_memory="parts"))
    assert ranks(config()) == (0, 2)
    assert ranks(parts) == (0, 1, 2, 3)
    assert ranks(on_gpus, "cuda") == (0, 1, 2, 3)
    assert ranks(on_gpus, "cpu") == (0, 2)  # it travels by way of the CPU
    assert ranks(config(), world=World()) == ranks(parts, world=World()) == (0,)
