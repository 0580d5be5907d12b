"""Which transport carries the weights. The trainer decides; receivers follow its `store_address`.

auto    shared memory, if trainer and generators run on this one host, on CPUs, and /dev/shm is
        large enough; else collective

With `collective`, `weight_sync.replica_memory` says how the ranks of a replica get a version.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from llamarl_hpc.channels.messages import SyncMember
from llamarl_hpc.config.schema import Config
from llamarl_hpc.placement import World, device_of, interface_address, is_one_host
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.types import ParameterSpec, TensorPart
from llamarl_hpc.weight_sync.base import (
    StagedWeights,
    WeightPublisher,
    WeightReceiver,
    WeightSource,
)
from llamarl_hpc.weight_sync.collective.publisher import CollectivePublisher
from llamarl_hpc.weight_sync.collective.receiver import CollectiveReceiver
from llamarl_hpc.weight_sync.collective.window_receiver import WindowReceiver
from llamarl_hpc.weight_sync.plan import make_arena
from llamarl_hpc.weight_sync.quantised_source import QuantisedSource, QuantisingPublisher
from llamarl_hpc.weight_sync.shared_memory.publisher import SharedMemoryPublisher
from llamarl_hpc.weight_sync.shared_memory.receiver import SharedMemoryReceiver
from llamarl_hpc.weight_sync.shared_memory.segment import shortage
from llamarl_hpc.weight_sync.targets import check_tiling

_log = logging.getLogger(__name__)


def make_publisher(
    run: RunDir, config: Config, world: World, source: WeightSource, device: str
) -> WeightPublisher:
    """The trainer's end; a collective call over its ranks. `device`: where the weights are.

    Raises ConfigError when shared memory is asked for and there is not enough.
    """
    if config.generator.quantization == "int8":
        quantised = QuantisedSource(source, world)
        publisher = _make_publisher(run, config, world, quantised, device)
        return QuantisingPublisher(quantised, publisher)
    return _make_publisher(run, config, world, source, device)


def _make_publisher(
    run: RunDir, config: Config, world: World, source: WeightSource, device: str
) -> WeightPublisher:
    if world.bcast(_takes_shared_memory(config, source, device) if world.is_leader else None):
        return SharedMemoryPublisher(run=run, config=config.weight_sync, world=world, source=source)
    return CollectivePublisher(
        config=config.weight_sync,
        world=world,
        source=source,
        device=_transfer_device(config, device),
        source_device=device,
        address=_address(config),
    )


def make_receiver(
    run: RunDir,
    config: Config,
    executor: str,
    world: World,
    device: str,
    specs: Sequence[ParameterSpec] | None = None,
    parts: Sequence[TensorPart] | None = None,
) -> WeightReceiver:
    """A generator rank's end; a collective call over the ranks of the replica.

    `device`: where the engine is; tensors may be handed out on the CPU all the same. `specs`: the
    tensors it needs, to refuse others early. `parts`: what this rank keeps of the tensors that the
    replica has cut up; those that are not named, it keeps whole. It is then given each tensor
    whole, or exactly its part.
    """
    if parts is not None and world.size > 1:
        check_tiling(world.allgather(list(parts)))
    return _Receiver(run, config, executor, world, device, specs, parts)


class _Receiver:
    """Becomes what the trainer's address asks for, at the first request."""

    def __init__(
        self,
        run: RunDir,
        config: Config,
        executor: str,
        world: World,
        device: str,
        specs: Sequence[ParameterSpec] | None,
        parts: Sequence[TensorPart] | None,
    ) -> None:
        self._run, self._config, self._device, self._specs = run, config, device, specs
        self._executor, self._world, self._parts = executor, world, parts
        self._shares = world.size > 1 and _replica_memory(config, device) == "window"
        first_of_node = world.allgather(world.local_rank == 0)
        self.ranks: tuple[int, ...] = tuple(
            rank for rank, is_first in enumerate(first_of_node) if is_first or not self._shares
        )
        self._receiver: WeightReceiver | None = None

    def start(
        self, version: int, epoch: int, members: Sequence[SyncMember], store_address: str
    ) -> None:
        if self._receiver is None:
            self._receiver = self._make(store_address)
        self._receiver.start(version, epoch, members, store_address)

    def poll(self) -> StagedWeights | None:
        return None if self._receiver is None else self._receiver.poll()

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()

    def _make(self, store_address: str) -> WeightReceiver:
        if not store_address:
            return SharedMemoryReceiver(
                run=self._run,
                config=self._config.weight_sync,
                executor=self._executor,
                rank=self._world.rank,
                specs=self._specs,
            )
        if self._shares:
            return WindowReceiver(
                config=self._config.weight_sync,
                executor=self._executor,
                world=self._world,
                ranks=self.ranks,
                address=_address(self._config),
                specs=self._specs,
            )
        return CollectiveReceiver(
            config=self._config.weight_sync,
            executor=self._executor,
            rank=self._world.rank,
            device=_transfer_device(self._config, self._device),
            address=_address(self._config),
            specs=self._specs,
            parts=self._parts if self._world.size > 1 else None,
        )


def _takes_shared_memory(config: Config, source: WeightSource, device: str) -> bool:
    transport = config.weight_sync.transport
    if transport != "auto":
        return transport == "shared_memory"
    if not is_one_host(config) or _transfer_device(config, device) == "cuda":
        return False
    problem = shortage(make_arena(source.parameter_specs()).num_bytes)
    if problem is not None:
        _log.warning("weights go over the network of this host instead: %s", problem)
    return problem is None


def _transfer_device(config: Config, own_device: str) -> str:
    """ "cuda" (NCCL) when both sides compute on GPUs, else "cpu" (gloo)."""
    sides = {own_device, *(device_of(config, executor) for executor in ("trainer", "generator"))}
    return "cuda" if sides == {"cuda"} else "cpu"


def _replica_memory(config: Config, device: str) -> str:
    choice = config.weight_sync.replica_memory
    if choice == "auto":
        return "parts" if _transfer_device(config, device) == "cuda" else "window"
    return choice


def _address(config: Config) -> str:
    if config.channels.interface is None and is_one_host(config):
        return "127.0.0.1"
    return interface_address(config.channels.interface)
