"""Weights travel from trainer ranks to generator ranks; this is what every transport offers.

    trainer:    engine --(plan)--> WeightPublisher.publish(v)      snapshot, then go on training
    generator:  WeightReceiver.start(v) -> poll() -> StagedWeights -> engine.load_weights -> release

A version is a transaction: it is published whole, verified by checksum at the receiver, and only
then used. A receiver that cannot verify raises `WeightSyncError` and keeps its old weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch

from llamarl_hpc.channels.messages import SyncMember
from llamarl_hpc.types import ParameterSpec


class WeightSource(Protocol):
    """What a transport reads from the trainer: its own shard of each parameter, no gathering."""

    def parameter_specs(self) -> list[ParameterSpec]:
        """All tensors the generators need, the same list in the same order on every rank."""

    def owned_range(self, name: str) -> tuple[int, int] | None:
        """Elements [start, end) of the flattened parameter that only this rank holds.

        None when every rank holds all of it (ZeRO 0-2); the plan then decides who sends what.
        """

    def read(self, name: str, start: int, end: int) -> torch.Tensor:
        """A 1-D tensor (view or copy) of elements [start, end), in the model's dtype, local."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What is known of a version once it is on its way."""

    checksum: str  # what every receiver must arrive at; "" with weight_sync.verify: off
    share: float  # of the version's bytes that went to each receiver; 1 but for deltas


@dataclass(frozen=True, kw_only=True)
class PublishReceipt:
    version: int
    num_bytes: int  # of the whole version
    seconds: float  # the trainer was kept from training
    # Leader only: set by a thread once it has summed up; cancelled when the version did not go out
    sent: Future[Sent] | None = None


class WeightPublisher(Protocol):
    """Lives on every trainer rank; all ranks make the same calls in the same order."""

    store_address: str  # "host:port" that receivers need, or "" (shared memory)

    def publish(self, version: int, epoch: int, members: Sequence[SyncMember]) -> PublishReceipt:
        """Snapshot the current weights as `version` and offer them to `members`.

        Returns once training may go on; the transfer itself may still be under way. A second
        call waits (with a deadline that names the slow member) for the first to finish.
        """

    def close(self) -> None:
        """Free buffers, groups and shared memory. Idempotent."""


class StagedWeights(Protocol):
    """A verified version, not yet in use."""

    version: int
    checksum: str

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) for every ParameterSpec, whole or this rank's part; valid until
        `release`."""

    def release(self) -> None:
        """The engine has copied what it needs; the buffer may be written again once every rank
        has said so."""


class WeightReceiver(Protocol):
    """Lives on every rank of a replica, and is called from its main thread.

    Making one, `start` and `close` are collective calls over the ranks. `poll` and `release` are
    not: each rank learns for itself what became of a version. Who runs the ranks lets none switch
    before all have it, and releases it unused where one could not take it.
    """

    ranks: tuple[int, ...]  # of the replica that fetch from the trainer, for `SyncMember`

    def start(
        self, version: int, epoch: int, members: Sequence[SyncMember], store_address: str
    ) -> None:
        """Begin to fetch `version`; decoding goes on meanwhile."""

    def poll(self) -> StagedWeights | None:
        """The staged version once it is here and verified; None before. Raises WeightSyncError."""

    def close(self) -> None:
        """Idempotent."""
