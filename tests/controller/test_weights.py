"""Versions on their way: who is asked, who refused, and when they are offered again."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from llamarl_hpc.channels.messages import (
    PublishWeights,
    ReceiveWeights,
    WeightsPublished,
    WeightsReceived,
    WeightsRefused,
    WeightsSummed,
)
from llamarl_hpc.config.schema import Config
from llamarl_hpc.controller.bell import Bell
from llamarl_hpc.controller.fleet import Fleet, Member
from llamarl_hpc.controller.schedule import Replica
from llamarl_hpc.controller.weights import WeightFlow
from llamarl_hpc.errors import WeightSyncError


class FakeFleet:
    """A trainer that publishes at once; replicas answer when the test says so."""

    def __init__(self) -> None:
        names = ("trainer", "generator.0", "generator.1")
        self.members = {name: Member(name) for name in names}
        self.flow: WeightFlow
        self.sent: list[tuple[str, object]] = []
        self.failed: list[tuple[str, str]] = []

    async def send(self, name: str, message: object) -> None:
        self.sent.append((name, message))
        if isinstance(message, PublishWeights):
            version, epoch = message.version, message.epoch
            self.flow.on_published(
                WeightsPublished(version=version, epoch=epoch, num_bytes=1, seconds=0.0)
            )

    def fail(self, name: str, reason: str) -> None:
        self.failed.append((name, reason))

    def asked(self) -> list[tuple[str, int, int]]:
        """(replica, version, epoch) of every request so far."""
        return [
            (name, m.version, m.epoch) for name, m in self.sent if isinstance(m, ReceiveWeights)
        ]


@pytest.fixture
def flow() -> WeightFlow:
    fleet: Any = FakeFleet()
    replicas = {name: Replica(name, ready=True) for name in ("generator.0", "generator.1")}
    fleet.flow = WeightFlow(Config(), cast("Fleet", fleet), Bell(), replicas)
    return cast("WeightFlow", fleet.flow)


def fleet_of(flow: WeightFlow) -> FakeFleet:
    return cast("FakeFleet", flow.fleet)


def publish(flow: WeightFlow, version: int) -> None:
    assert flow.is_due(version)
    asyncio.run(flow.publish(version))


def received(flow: WeightFlow, replica: str, version: int, checksum: str = "a") -> None:
    flow.on_received(
        replica,
        WeightsReceived(version=version, epoch=flow.epoch, checksum=checksum, seconds=0.1),
    )


def refused(flow: WeightFlow, replica: str, version: int) -> None:
    flow.on_refused(
        replica, WeightsRefused(version=version, epoch=flow.epoch, reason="a bad checksum")
    )


def test_a_replica_that_refuses_keeps_its_version_and_is_asked_again_in_a_new_group(
    flow: WeightFlow,
) -> None:
    publish(flow, 1)
    received(flow, "generator.0", 1)
    assert not flow.is_due(1)  # the other one is still at it
    refused(flow, "generator.1", 1)
    assert flow.replicas["generator.1"].version == -1
    publish(flow, 1)
    assert fleet_of(flow).asked()[2:] == [("generator.1", 1, 2)]
    received(flow, "generator.1", 1)
    assert flow.replicas["generator.1"].version == 1 and not flow.is_due(1)
    publish(flow, 2)
    assert {epoch for _, _, epoch in fleet_of(flow).asked()[3:]} == {3}


def test_a_replica_that_always_refuses_is_given_up(flow: WeightFlow) -> None:
    publish(flow, 1)
    received(flow, "generator.0", 1)
    for round_ in range(3):
        assert not fleet_of(flow).failed
        refused(flow, "generator.1", 1)
        if round_ < 2:
            publish(flow, 1)
    ((name, reason),) = fleet_of(flow).failed
    assert name == "generator.1" and "3 times in a row: a bad checksum" in reason


def test_a_refusal_after_the_replica_was_lost_changes_nothing(flow: WeightFlow) -> None:
    publish(flow, 1)
    flow.on_lost("generator.1")
    refused(flow, "generator.1", 1)
    assert not flow._refusals


@pytest.mark.parametrize("trainer_first", [True, False])
def test_another_checksum_than_the_trainers_ends_the_run_whoever_speaks_first(
    flow: WeightFlow, trainer_first: bool
) -> None:
    publish(flow, 1)
    received(flow, "generator.1", 1, "a")
    summed = WeightsSummed(version=1, epoch=1, checksum="a")
    if trainer_first:
        flow.on_summed(summed)
        with pytest.raises(WeightSyncError, match=r"generator\.0 holds version 1 with checksum b"):
            received(flow, "generator.0", 1, "b")
    else:
        received(flow, "generator.0", 1, "b")
        with pytest.raises(WeightSyncError, match=r"generator\.0 holds version 1 with checksum b"):
            flow.on_summed(summed)


def test_a_checksum_that_comes_late_is_still_compared(flow: WeightFlow) -> None:
    publish(flow, 1)
    for replica in flow.replicas:
        received(flow, replica, 1, "a")
    publish(flow, 2)
    with pytest.raises(WeightSyncError, match="holds version 1"):
        flow.on_summed(WeightsSummed(version=1, epoch=1, checksum="b"))


def test_a_replica_says_which_of_its_ranks_are_waited_for(flow: WeightFlow) -> None:
    fleet_of(flow).members["generator.1"].detail = {"fetching_ranks": "0,4"}
    publish(flow, 1)
    wanted = [("generator.0", (0,)), ("generator.1", (0, 4))]
    offers = [m for _, m in fleet_of(flow).sent if isinstance(m, ReceiveWeights | PublishWeights)]
    assert len(offers) == 3
    for offer in offers:
        assert [(member.executor, member.ranks) for member in offer.members] == wanted
