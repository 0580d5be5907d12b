"""New weights for all ranks of a replica at once: none switches before every one has them.

leader     ReceiveWeights ----> every rank fetches, each for itself
others     Arrival <----------- once the version is staged, or could not be
leader     Switch ------------> between two forward passes: every rank loads what it has
                                staged, or, where one could not stage it, forgets it
"""

from __future__ import annotations

from dataclasses import dataclass

from llamarl_hpc.channels.messages import ReceiveWeights
from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.placement import World
from llamarl_hpc.weight_sync.base import StagedWeights, WeightReceiver


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """What became of the version under way on one rank."""

    rank: int
    host: str
    problem: str  # empty: it is staged


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """To the other ranks: what to do with what they have staged."""

    take: bool


class RankWeights:
    """One rank's version under way."""

    def __init__(self, receiver: WeightReceiver, world: World) -> None:
        self._receiver, self._world = receiver, world
        self._awaited = False
        self.staged: StagedWeights | None = None

    def start(self, request: ReceiveWeights) -> None:
        self._awaited, self.staged = True, None
        self._receiver.start(request.version, request.epoch, request.members, request.store_address)

    def look(self) -> Arrival | None:
        """Once for each version, when it has come or failed; None before and after that."""
        if not self._awaited:
            return None
        problem = ""
        try:
            self.staged = self._receiver.poll()
        except WeightSyncError as error:
            problem = str(error)
        if self.staged is None and not problem:
            return None
        self._awaited = False
        return Arrival(rank=self._world.rank, host=self._world.host, problem=problem)

    def forget(self) -> None:
        if self.staged is not None:
            self.staged.release()
            self.staged = None


class ReplicaWeights:
    """The leader's view: its own version under way, and what the other ranks say of theirs."""

    def __init__(self, receiver: WeightReceiver, world: World) -> None:
        self._own, self._world = RankWeights(receiver, world), world
        self._arrivals: list[Arrival] = []

    def start(self, request: ReceiveWeights) -> None:
        self._world.share(request)
        self._arrivals = []
        self._own.start(request)

    def poll(self) -> StagedWeights | None:
        """The version, once every rank has it. Raises WeightSyncError, once all have been heard,
        if one could not get it; then all have forgotten it."""
        arrival = self._own.look()
        self._arrivals += [arrival] if arrival is not None else []
        self._arrivals += self._world.replies()
        if len(self._arrivals) < self._world.size:
            return None
        for arrival in sorted(self._arrivals, key=lambda arrival: arrival.rank):
            if arrival.problem:
                self._own.forget()
                self._world.share(Switch(take=False))
                raise WeightSyncError(self._refusal(arrival))
        self._arrivals = []
        return self._own.staged

    def _refusal(self, arrival: Arrival) -> str:
        if self._world.size == 1:
            return arrival.problem
        return f"rank {arrival.rank} of {self._world.size} on {arrival.host}: {arrival.problem}"

    def switch(self) -> None:
        """The other ranks load the version that `poll` returned; the leader does it after this."""
        self._world.share(Switch(take=True))
