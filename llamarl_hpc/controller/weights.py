"""Which version is where, and when the next one may go out.

One version is under way at a time. It is offered to the replicas that are older than the trainer,
and the next is not offered before all of them hold it or are gone; so a transport needs two
buffers and no queue. The trainer is asked only between optimizer steps and is kept for the
snapshot alone; the transfer runs beside the next step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from llamarl_hpc.channels.messages import (
    PublishWeights,
    ReceiveWeights,
    SyncMember,
    WeightsPublished,
    WeightsReceived,
    WeightsRefused,
    WeightsSummed,
)
from llamarl_hpc.config.schema import Config
from llamarl_hpc.controller.bell import Bell
from llamarl_hpc.controller.fleet import Fleet
from llamarl_hpc.controller.schedule import Replica
from llamarl_hpc.errors import ExecutorFailed, WeightSyncError

log = logging.getLogger(__name__)
_MAX_REFUSALS = 3


class WeightFlow:
    """Drives weight syncs. `replicas` is shared with the schedule, which reads the versions."""

    def __init__(
        self, config: Config, fleet: Fleet, bell: Bell, replicas: dict[str, Replica]
    ) -> None:
        self.config, self.fleet, self.bell, self.replicas = config, fleet, bell, replicas
        self.is_held: Callable[[], bool] = lambda: False  # an evaluation needs today's weights
        self.epoch = 0
        self.offered = -1  # the newest version that was published
        self.last_seconds = 0.0  # from the last request until the last replica had switched
        self.last_blocking_seconds = 0.0  # for which the trainer was kept, last time
        self.last_num_bytes = 0  # of the version that was published last
        self.last_sent_share = 1.0  # of the bytes of a version that travelled, last time
        self._members: tuple[str, ...] = ()
        self._published: WeightsPublished | None = None
        self._announced: dict[int, str] = {}  # version -> the trainer's checksum
        self._found: dict[int, dict[str, str]] = {}  # version -> replica -> its checksum
        self._refusals: dict[str, int] = {}  # replica -> in a row
        self._started = 0.0

    def is_due(self, version: int) -> bool:
        """The trainer, idle at `version`, should publish now."""
        return bool(not self._switching() and self._behind(version) and not self.is_held())

    def _switching(self) -> list[str]:
        """Replicas that were asked and have not switched yet."""
        return sorted(r.name for r in self.replicas.values() if r.switching)

    def _behind(self, version: int) -> list[str]:
        return sorted(r.name for r in self.replicas.values() if r.ready and r.version < version)

    async def publish(self, version: int) -> None:
        """Offer the trainer's weights to every replica that is behind; returns when the trainer
        may go on training."""
        members = tuple(self._behind(version))
        if members != self._members:
            self.epoch, self._members = self.epoch + 1, members
        for name in members:
            self.replicas[name].switching = True
        self._published = None
        for known in (self._announced, self._found):  # what is still on its way may be of these
            for old in [v for v in known if v < self.offered]:
                del known[old]
        self._started = time.monotonic()
        group = [SyncMember(executor=name, ranks=self._fetching(name)) for name in members]
        address = self.fleet.members["trainer"].detail.get("store_address", "")
        for name in members:
            await self.fleet.send(
                name,
                ReceiveWeights(
                    version=version, epoch=self.epoch, members=group, store_address=address
                ),
            )
        await self.fleet.send(
            "trainer", PublishWeights(version=version, epoch=self.epoch, members=group)
        )
        limit = self.config.weight_sync.timeout_s
        if not await self.bell.until(lambda: self._published is not None, timeout_s=limit):
            host = self.fleet.members["trainer"].host
            raise ExecutorFailed(
                "trainer",
                0,
                host,
                f"did not publish version {version} to {', '.join(members)} within {limit:.0f} s "
                "(weight_sync.timeout_s)",
            )
        self.offered = version

    def _fetching(self, replica: str) -> tuple[int, ...]:
        """Ranks that fetch, as the replica has said."""
        ranks = self.fleet.members[replica].detail.get("fetching_ranks", "0")
        return tuple(int(rank) for rank in ranks.split(","))

    def late(self, limit_s: float) -> list[str]:
        """Replicas that were asked more than `limit_s` seconds ago and have not switched."""
        return self._switching() if time.monotonic() - self._started > limit_s else []

    def on_published(self, message: WeightsPublished) -> None:
        self._published = message
        self.last_blocking_seconds = message.seconds
        self.last_num_bytes = message.num_bytes
        self.bell.ring()

    def on_summed(self, message: WeightsSummed) -> None:
        """What the trainer offered has this checksum."""
        self.last_sent_share = message.sent_share
        self._announced[message.version] = message.checksum
        self._compare_checksums(message.version)

    def on_received(self, replica: str, message: WeightsReceived) -> None:
        """A replica switched."""
        self.replicas[replica].version = message.version
        if self.replicas[replica].switching:
            self.replicas[replica].switching = False
            self._refusals.pop(replica, None)
            self._found.setdefault(message.version, {})[replica] = message.checksum
            self._compare_checksums(message.version)
        if not self._switching():
            self.last_seconds = time.monotonic() - self._started
        self.bell.ring()

    def on_refused(self, replica: str, message: WeightsRefused) -> None:
        """A replica could not verify a version and keeps its old one. It is offered weights again
        as soon as the trainer is idle, by a new group; one that never succeeds is given up."""
        if not self.replicas[replica].switching:
            return
        self.on_lost(replica)
        self._refusals[replica] = self._refusals.get(replica, 0) + 1
        log.warning("%s keeps its old weights: %s", replica, message.reason)
        if self._refusals[replica] >= _MAX_REFUSALS:
            del self._refusals[replica]
            times = f"{_MAX_REFUSALS} times in a row"
            self.fleet.fail(replica, f"could not take new weights {times}: {message.reason}")
        self.bell.ring()

    def _compare_checksums(self, version: int) -> None:
        """Every replica must hold, bit for bit, what the trainer published."""
        announced = self._announced.get(version)
        for replica, checksum in self._found.get(version, {}).items():
            if announced is not None and checksum != announced:
                raise WeightSyncError(
                    f"{replica} holds version {version} with checksum {checksum}, the trainer "
                    f"published {announced}"
                )

    def on_lost(self, replica: str) -> None:
        self.replicas[replica].switching = False
        self._members = ()  # the next group is formed anew
