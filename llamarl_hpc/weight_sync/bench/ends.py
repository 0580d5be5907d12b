"""Part of `llamarl-hpc bench weight-sync`: the two ends of a transport, made as its keys say."""

from __future__ import annotations

from llamarl_hpc.config.schema import WeightSyncConfig
from llamarl_hpc.placement import World
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.weight_sync.base import WeightPublisher, WeightReceiver, WeightSource
from llamarl_hpc.weight_sync.bench.task import Transport
from llamarl_hpc.weight_sync.collective.publisher import CollectivePublisher
from llamarl_hpc.weight_sync.collective.receiver import CollectiveReceiver
from llamarl_hpc.weight_sync.quantised_source import QuantisedSource, QuantisingPublisher
from llamarl_hpc.weight_sync.shared_memory.publisher import SharedMemoryPublisher
from llamarl_hpc.weight_sync.shared_memory.receiver import SharedMemoryReceiver

HOST = "127.0.0.1"
TIMEOUT_S = 300.0


def make_publisher(
    transport: Transport, run: RunDir, world: World, source: WeightSource
) -> WeightPublisher:
    """A collective call over the trainer's ranks."""
    if not transport.is_int8:
        return _publisher(transport, run, world, source)
    quantised = QuantisedSource(source, world)
    return QuantisingPublisher(quantised, _publisher(transport, run, world, quantised))


def make_receiver(transport: Transport, run: RunDir, replica: int) -> WeightReceiver:
    executor, config = f"generator.{replica}", _config(transport)
    if config.transport == "shared_memory":
        return SharedMemoryReceiver(run=run, config=config, executor=executor, rank=0)
    return CollectiveReceiver(config=config, executor=executor, rank=0, device="cpu", address=HOST)


def _publisher(
    transport: Transport, run: RunDir, world: World, source: WeightSource
) -> WeightPublisher:
    config = _config(transport)
    if config.transport == "shared_memory":
        return SharedMemoryPublisher(run=run, config=config, world=world, source=source)
    return CollectivePublisher(
        config=config, world=world, source=source, device="cpu", source_device="cpu", address=HOST
    )


def _config(transport: Transport) -> WeightSyncConfig:
    return WeightSyncConfig.model_validate(transport.keys | {"timeout_s": TIMEOUT_S})
