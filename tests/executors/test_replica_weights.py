"""The ranks of a replica take a version together, or keep the old one together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from llamarl_hpc.channels.messages import ReceiveWeights, SyncMember
from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.executors.replica_weights import Arrival, RankWeights, ReplicaWeights, Switch

REQUEST = ReceiveWeights(version=7, epoch=1, members=[SyncMember(executor="generator.0")])


@dataclass
class OtherRanks:
    """A leader's world, whose other ranks say what a test lets them say."""

    size: int = 3
    rank: int = 0
    host: str = "here"
    said: list[Arrival] = field(default_factory=list)
    heard: list[Any] = field(default_factory=list)

    def share(self, command: Any) -> Any:
        self.heard.append(command)
        return command

    def replies(self) -> list[Arrival]:
        said, self.said = self.said, []
        return said


class Staged:
    version, checksum = 7, "abc"
    released = 0

    def release(self) -> None:
        self.released += 1


class Receiver:
    """Its next answers to `poll`; an error is raised."""

    def __init__(self) -> None:
        self.answers: list[Staged | WeightSyncError | None] = []
        self.started: list[int] = []

    def start(self, version: int, *where: object) -> None:
        self.started.append(version)

    def poll(self) -> Staged | None:
        answer = self.answers.pop(0)
        if isinstance(answer, WeightSyncError):
            raise answer
        return answer


def arrival(rank: int, problem: str = "") -> Arrival:
    return Arrival(rank=rank, host=f"node{rank}", problem=problem)


def made(size: int = 3) -> tuple[ReplicaWeights, Any, Any]:
    world, receiver = OtherRanks(size=size), Receiver()
    weights = ReplicaWeights(receiver, world)  # type: ignore[arg-type]
    weights.start(REQUEST)
    assert receiver.started == [7] and world.heard == [REQUEST]
    return weights, world, receiver


def test_a_version_is_there_when_the_last_rank_has_it() -> None:
    weights, world, receiver = made()
    staged = Staged()
    receiver.answers = [None, None, staged]  # asked no more once it is staged
    assert weights.poll() is None
    world.said = [arrival(2)]
    assert weights.poll() is None
    assert weights.poll() is None
    world.said = [arrival(1)]
    assert weights.poll() is staged
    weights.switch()
    assert world.heard[1:] == [Switch(take=True)] and staged.released == 0


def test_a_rank_that_could_not_get_it_is_named_and_no_rank_switches() -> None:
    weights, world, receiver = made()
    staged = Staged()
    receiver.answers = [staged]
    world.said = [arrival(2, "checksum differs")]
    assert weights.poll() is None  # rank 1 is still at it
    world.said = [arrival(1)]
    with pytest.raises(WeightSyncError, match=r"^rank 2 of 3 on node2: checksum differs$"):
        weights.poll()
    assert world.heard[1:] == [Switch(take=False)] and staged.released == 1

    weights.start(REQUEST)  # offered again
    receiver.answers, world.said = [Staged()], [arrival(1), arrival(2)]
    assert weights.poll() is not None


def test_the_leaders_own_failure_waits_for_what_the_others_say() -> None:
    weights, world, receiver = made(size=2)
    receiver.answers = [WeightSyncError("no room")]
    assert weights.poll() is None and weights.poll() is None
    world.said = [arrival(1)]
    with pytest.raises(WeightSyncError, match=r"^rank 0 of 2 on here: no room$"):
        weights.poll()
    assert world.heard[1:] == [Switch(take=False)]


def test_one_rank_says_what_its_receiver_says() -> None:
    weights, _, receiver = made(size=1)
    staged = Staged()
    receiver.answers = [None, staged]
    assert weights.poll() is None
    assert weights.poll() is staged
    weights.start(REQUEST)
    receiver.answers = [WeightSyncError("no room")]
    with pytest.raises(WeightSyncError, match=r"^no room$"):
        weights.poll()


def test_a_follower_tells_once_of_each_version() -> None:
    receiver: Any = Receiver()
    own = RankWeights(receiver, OtherRanks(rank=1))  # type: ignore[arg-type]
    assert own.look() is None  # nothing is under way: the receiver is not asked
    own.start(REQUEST)
    staged = Staged()
    receiver.answers = [None, staged]
    assert own.look() is None
    assert own.look() == Arrival(rank=1, host="here", problem="")
    assert own.look() is None
    own.forget()
    assert staged.released == 1 and own.staged is None
