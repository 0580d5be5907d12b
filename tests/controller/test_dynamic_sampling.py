"""Dynamic sampling: groups without spread are replaced; the bound, the books and the end hold."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import numpy as np
import pytest
from test_rollouts import Scene, completed, prompt, scores

from llamarl_hpc.batching.buffer import RolloutBuffer, ScoredGroup
from llamarl_hpc.controller.schedule import Replica, Schedule
from llamarl_hpc.types import Purpose, Status


def group(ticket: int, *, constant: bool) -> ScoredGroup:
    return ScoredGroup(
        ticket=ticket,
        issue=1,
        prompt=prompt(ticket),
        generator="generator.0",
        completions=[],
        rewards={},
        reward=[1.0, 1.0] if constant else [0.0, 1.0],
        error="",
        t_issued=0.0,
        t_generated=0.0,
        t_scored=0.0,
    )


def is_constant(group: ScoredGroup) -> bool:
    return len(set(group.reward)) == 1


def batches_by_hand(constant: list[bool], steps: int, size: int, bound: int) -> list[list[int]]:
    """Tickets in order; a constant one is passed over while its step has replacements left."""
    batches, tickets = [], iter(range(len(constant)))
    for _ in range(steps):
        batch: list[int] = []
        left = bound
        while len(batch) < size:
            ticket = next(tickets)
            if constant[ticket] and left:
                left -= 1
            else:
                batch.append(ticket)
        batches.append(batch)
    return batches


class Simulation:
    """Replicas that answer in any order, a trainer, and a resume in the middle."""

    def __init__(self, rng: random.Random, constant: list[bool], **settings: int) -> None:
        self.rng, self.constant = rng, constant
        self.steps, self.size = settings["steps"], settings["size"]
        self.staleness, self.bound = settings["staleness"], settings["bound"]
        self.batches: list[list[int]] = []
        self.fates: Counter[int] = Counter()
        self.drops: list[int] = []
        self.start(step=0, dropped=0)

    def start(self, *, step: int, dropped: int) -> None:
        """As an attempt begins from a checkpoint."""
        self.step, self.dropped = step, dropped
        first = step * self.size + dropped
        self.schedule = Schedule(
            prompts_per_step=self.size,
            num_generations=1,
            max_staleness=self.staleness,
            max_outstanding=100,
            next_ticket=first,
            end_ticket=self.steps * self.size,
            dropped=dropped,
            replicas={f"g{k}": Replica(f"g{k}", version=step, ready=True) for k in range(2)},
        )
        self.buffer = RolloutBuffer(
            prompts_per_step=self.size,
            first_step=step,
            first_ticket=first,
            max_resamples=self.bound,
            is_constant=is_constant,
        )
        self.flying: dict[int, int] = {}  # ticket -> version that draws it
        self.versions: dict[int, int] = {}
        for ticket in [t for t in self.fates if t >= first]:
            del self.fates[ticket]  # of the attempt before, and made again
        del self.batches[step:]

    def run(self, until: int) -> None:
        while self.step < until:
            for replica, ticket in self.schedule.assign():
                self.flying[ticket] = self.schedule.replicas[replica].version
            can_train = not self.buffer.missing(self.step)
            assert self.flying or can_train, "nothing can go on"
            if self.flying and (not can_train or self.rng.random() < 0.7):
                self.finish(self.rng.choice(sorted(self.flying)))
            else:
                self.train()

    def finish(self, ticket: int) -> None:
        self.versions[ticket] = self.flying.pop(ticket)
        for replica in self.schedule.replicas.values():
            replica.sequences = 0
        for dropped in self.buffer.put(group(ticket, constant=self.constant[ticket])):
            self.schedule.dropped += 1
            self.fates[dropped.ticket] += 1
            self.drops.append(dropped.ticket)

    def train(self) -> None:
        batch = [g.ticket for g in self.buffer.take(self.step)]
        for ticket in batch:
            assert 0 <= self.step - self.versions[ticket] <= self.staleness
            self.fates[ticket] += 1
        assert self.buffer.replaced(self.step) <= self.bound
        self.batches.append(batch)
        self.step += 1
        self.dropped = batch[-1] + 1 - self.step * self.size
        for replica in self.schedule.replicas.values():
            if self.rng.random() < 0.8 or self.staleness == 0:
                replica.version = self.step


@pytest.mark.parametrize("seed", range(60))
def test_batches_depend_on_rewards_alone_and_everything_is_resolved_once(seed: int) -> None:
    rng = random.Random(seed)
    steps, size = rng.randint(1, 8), rng.randint(1, 4)
    bound, staleness = rng.choice([0, 1, 3, 12]), rng.randint(0, 3)
    share = rng.choice([0.0, 0.3, 0.7, 1.0])
    constant = [rng.random() < share for _ in range(steps * (size + bound))]
    run = Simulation(rng, constant, steps=steps, size=size, staleness=staleness, bound=bound)
    middle = rng.randint(0, steps)
    run.run(until=middle)
    saved = {"step": run.step, "dropped": run.dropped}
    run.run(until=rng.randint(middle, steps))  # lost again by the resume
    run.start(**saved)
    run.run(until=steps)
    assert run.batches == batches_by_hand(constant, steps, size, bound)
    assert not run.flying and len(run.buffer) == 0  # nothing was issued in vain
    assert set(run.fates) == set(range(len(run.fates))) and set(run.fates.values()) <= {1}
    assert all(constant[ticket] for ticket in run.drops)


async def test_a_replaced_group_is_dropped_in_the_books_and_makes_room_for_another() -> None:
    scene = Scene(dynamic_sampling=True, max_resamples=1)
    await scene.flow.pump()
    assert scene.flow.schedule.next_ticket == 4  # two steps of two prompts
    requests = {r.group_id: r for name in scene.replicas for r in scene.fleet.requests(name)}
    for ticket in (1, 0):  # all rewards are 1
        request = requests[ticket]
        replica = scene.flow._generating[(Purpose.TRAIN, ticket)].replica
        await scene.flow.on_generated(replica, [completed(request)])
        scene.flow.on_scored([scores(Purpose.TRAIN, ticket, 3)])
    (record,) = scene.records
    assert (record.group_id, record.status) == (0, Status.DROPPED)
    assert record.reason == "constant reward" and len(record.completions) == 3
    assert scene.flow.buffer.missing(0) == [2]  # 1 was kept: a step may replace one
    await scene.flow.pump()
    assert scene.flow.schedule.next_ticket == 5
    replica = scene.flow._generating[(Purpose.TRAIN, 2)].replica
    await scene.flow.on_generated(replica, [completed(requests[2])])
    uneven = scores(Purpose.TRAIN, 2, 3)
    scene.flow.on_scored([msgspec.structs.replace(uneven, total=[0.0, 1.0, 1.0])])
    assert [g.ticket for g in scene.flow.take(0)] == [1, 2]
    assert scene.flow.sampling_figures(0) == {
        "dynamic_sampling/replaced": 1.0,
        "dynamic_sampling/bound_reached": 1.0,
    }


async def test_groups_that_could_not_be_scored_are_not_taken_for_constant() -> None:
    scene = Scene(dynamic_sampling=True)
    await scene.flow.pump()
    for name in scene.replicas:
        for request in scene.fleet.requests(name):
            await scene.flow.on_generated(name, [completed(request)])
            failed = scores(Purpose.TRAIN, request.group_id, 3)
            scene.flow.on_scored([msgspec.structs.replace(failed, error="ValueError")])
    assert scene.records == [] and np.all([g.failed for g in scene.flow.take(0)])
