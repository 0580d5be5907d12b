"""Part of `llamarl-hpc bench weight-sync`: replicas of several ranks, which receive once."""

from __future__ import annotations

import time

from llamarl_hpc.channels.messages import SyncMember
from llamarl_hpc.config.schema import WeightSyncConfig
from llamarl_hpc.placement import World
from llamarl_hpc.weight_sync.base import StagedWeights, WeightSource
from llamarl_hpc.weight_sync.collective.publisher import CollectivePublisher
from llamarl_hpc.weight_sync.collective.window_receiver import WindowReceiver

_HOST = "127.0.0.1"
_POLL_S = 0.0005


class ReplicaWay:
    """The collective transport to replicas whose ranks share a window. On every process."""

    def __init__(
        self,
        *,
        config: WeightSyncConfig,
        everybody: World,
        world: World,
        source: WeightSource | None,
        replicas: int,
        number: int,
    ) -> None:
        """`world`: the trainer's ranks, or those of replica `number`; `source`: the trainer's."""
        self._members = [SyncMember(executor=f"generator.{k}") for k in range(replicas)]
        self._publisher: CollectivePublisher | None = None
        self._receiver: WindowReceiver | None = None
        self._staged: StagedWeights | None = None
        self._address = ""
        if source is not None:
            self._publisher = CollectivePublisher(
                config=config,
                world=world,
                source=source,
                device="cpu",
                source_device="cpu",
                address=_HOST,
            )
            self._address = self._publisher.store_address
        else:
            self._receiver = WindowReceiver(
                config=config,
                executor=f"generator.{number}",
                world=world,
                ranks=(0,),
                address=_HOST,
            )
        self._address = everybody.bcast(self._address)

    def sync(self, version: int) -> None:
        """Returns when this rank may read the version."""
        if self._publisher is not None:
            self._publisher.publish(version, 1, self._members)
        elif self._receiver is not None:
            self._receiver.start(version, 1, self._members, self._address)
            while (staged := self._receiver.poll()) is None:
                time.sleep(_POLL_S)
            self._staged = staged

    def release(self) -> None:
        if self._staged is not None:
            self._staged.release()

    def close(self) -> None:
        for end in (self._publisher, self._receiver):
            if end is not None:
                end.close()
