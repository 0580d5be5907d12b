"""Which groups may start now, and where: a pure function of what is known, tested by values.

A replica is eligible for a ticket when its weights are new enough for the staleness bound and it
has room. Tickets go out in order, to the least loaded eligible replica; a ticket that came back
(its replica died) goes out before new ones because it is the one a batch waits for. While some
replicas are still switching to new weights, the ones that were quicker take no more than their
share of a step, or they would do the work of all.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from llamarl_hpc.batching.staleness import oldest_version_allowed, step_of


@dataclass
class Replica:
    """What the controller knows of one generator replica."""

    name: str
    version: int = -1  # of the weights it acknowledged; -1: none yet
    switching: bool = False  # newer weights are on their way to it
    ready: bool = False  # said hello, not known to be dead
    sequences: int = 0  # completions outstanding there


@dataclass
class Schedule:
    """Tickets and replicas. From `next_ticket` on, none has been issued yet; the run consumes
    `end_ticket` of them, those that are dropped not counted."""

    prompts_per_step: int
    num_generations: int
    max_staleness: int
    max_outstanding: int  # completions a replica may hold, running and queued
    next_ticket: int
    end_ticket: int
    dropped: int = 0  # tickets before all that are on their way that no step will consume
    skipped_steps: int = 0  # batches that made no optimizer step; the version lags by so many
    replicas: dict[str, Replica] = field(default_factory=dict)
    _returned: list[int] = field(default_factory=list)  # heap

    @property
    def is_exhausted(self) -> bool:
        """Nothing is left to issue."""
        return self._peek() is None

    def step_of(self, ticket: int) -> int:
        """The step that consumes this ticket, or a later one than that: more may be dropped."""
        return step_of(ticket - self.dropped, prompts_per_step=self.prompts_per_step)

    def give_back(self, ticket: int) -> None:
        """The ticket's replica is gone; it must be started again."""
        heapq.heappush(self._returned, ticket)

    def assign(self) -> list[tuple[str, int]]:
        """(replica, ticket) for everything that may start now; marks it as issued."""
        assigned = []
        while (ticket := self._peek()) is not None:
            replica = self._best_replica(ticket)
            if replica is None:
                break
            self._pop(ticket)
            replica.sequences += self.num_generations
            assigned.append((replica.name, ticket))
        return assigned

    def _peek(self) -> int | None:
        if self._returned:
            return self._returned[0]
        return self.next_ticket if self.next_ticket - self.dropped < self.end_ticket else None

    def _pop(self, ticket: int) -> None:
        if self._returned and self._returned[0] == ticket:
            heapq.heappop(self._returned)
        else:
            self.next_ticket += 1

    def _best_replica(self, ticket: int) -> Replica | None:
        version = oldest_version_allowed(
            ticket - self.dropped,
            prompts_per_step=self.prompts_per_step,
            max_staleness=self.max_staleness,
        )
        room = self._room()
        eligible = [
            r
            for r in self.replicas.values()
            if r.ready
            and r.version + self.skipped_steps >= version
            and r.sequences + self.num_generations <= room
        ]
        return min(eligible, key=lambda r: (r.sequences, r.name), default=None)

    def _room(self) -> int:
        """Completions that any one replica may hold now."""
        ready = [r for r in self.replicas.values() if r.ready]
        if not any(r.switching for r in ready):
            return self.max_outstanding
        share = -(-self.prompts_per_step // len(ready))  # rounded up
        return min(self.max_outstanding, share * self.num_generations)
