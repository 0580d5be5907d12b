"""The way of a group from issue to buffer, and every way to lose one, with a fake fleet."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest

from llamarl_hpc.channels.messages import Generate, GroupScores, Score
from llamarl_hpc.config.schema import Config
from llamarl_hpc.controller.bell import Bell
from llamarl_hpc.controller.evaluation import HeldOut
from llamarl_hpc.controller.reference import ReferenceModels
from llamarl_hpc.controller.rollouts import RolloutFlow
from llamarl_hpc.controller.schedule import Replica, Schedule
from llamarl_hpc.storage.records import GroupRecord
from llamarl_hpc.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    GroupCompletions,
    Prompt,
    Purpose,
    Status,
    VersionSpan,
)


@dataclass
class FakeFleet:
    """Remembers what was sent to whom."""

    sent: list[tuple[str, object]] = field(default_factory=list)

    async def send(self, executor: str, message: object) -> None:
        self.sent.append((executor, message))

    def requests(self, executor: str) -> list[GenerationRequest]:
        return [
            request
            for name, message in self.sent
            if name == executor and isinstance(message, Generate)
            for request in message.requests
        ]


def prompt(number: int) -> Prompt:
    return Prompt(
        prompt_id=f"p{number}",
        epoch=0,
        text=f"question {number}",
        token_ids=np.array([1, 2, number], dtype=np.int32),
        columns={"answer": "1"},
    )


def completed(request: GenerationRequest, version: int = 0) -> GroupCompletions:
    completion = Completion(
        token_ids=np.array([5, 6], dtype=np.int32),
        logprobs=np.array([-0.1, -0.2], dtype=np.float32),
        versions=[VersionSpan(0, 2, version)],
        finish_reason=FinishReason.STOP,
        text="1",
        t_start=0.0,
        t_end=1.0,
    )
    return GroupCompletions(
        purpose=request.purpose,
        group_id=request.group_id,
        completions=[completion] * request.num_generations,
    )


def scores(purpose: Purpose, group_id: int, count: int) -> GroupScores:
    return GroupScores(
        purpose=purpose,
        group_id=group_id,
        components={"math_answer": [1.0] * count},
        total=[1.0] * count,
        t_start=0.0,
        t_end=0.0,
    )


class Scene:
    """A flow with two replicas at version 0, two prompts a step, three completions a prompt."""

    def __init__(self, heldout: int = 0, **algorithm: object) -> None:
        self.config = Config.model_validate(
            {
                "rollout": {"prompts_per_step": 2, "num_generations": 3},
                "algorithm": {"max_staleness": 1, **algorithm},
                "evaluation": {"num_generations": 1},
            }
        )
        names = ("generator.0", "generator.1")
        self.replicas = {name: Replica(name, version=0, ready=True) for name in names}
        self.fleet, self.records = FakeFleet(), list[GroupRecord]()
        self.heldout = HeldOut(
            self.config, [prompt(100 + k) for k in range(heldout)], self.replicas
        )
        self.flow = RolloutFlow(
            self.config,
            fleet=self.fleet,  # type: ignore[arg-type]
            bell=Bell(),
            schedule=Schedule(
                prompts_per_step=2,
                num_generations=3,
                max_staleness=1,
                max_outstanding=100,
                next_ticket=0,
                end_ticket=20,
                replicas=self.replicas,
            ),
            heldout=self.heldout,
            prompt_of=prompt,
            store=self.records.append,
            references=ReferenceModels(self.config, Path("nowhere"), step=0),
            attempt=1,
        )

    async def finish(self, replica: str) -> None:
        """The replica answers everything; the reward executor too."""
        for request in self.fleet.requests(replica):
            await self.flow.on_generated(replica, [completed(request)])
            self.flow.on_scored(
                [scores(request.purpose, request.group_id, request.num_generations)]
            )


async def test_two_steps_of_groups_go_out_at_once_and_fill_the_buffer() -> None:
    scene = Scene()
    await scene.flow.pump()
    assert len([m for _, m in scene.fleet.sent if isinstance(m, Generate)]) == 2  # one a replica
    for replica in scene.replicas:
        await scene.finish(replica)
    assert scene.flow.buffer.missing(0) == [] and scene.flow.buffer.missing(1) == []
    assert [group.ticket for group in scene.flow.buffer.take(0)] == [0, 1]
    assert scene.replicas["generator.0"].sequences == 0


async def test_groups_of_a_lost_replica_are_abandoned_and_issued_again() -> None:
    scene = Scene()
    await scene.flow.pump()
    lost = {request.group_id for request in scene.fleet.requests("generator.1")}
    scene.replicas["generator.1"].ready = False
    scene.flow.on_replica_lost("generator.1", "generator.1 lost: killed")
    assert {record.group_id for record in scene.records} == lost
    assert {(r.status, r.issue, r.reason) for r in scene.records} == {
        (Status.ABANDONED, 1, "generator.1 lost: killed")
    }
    await scene.flow.pump()
    await scene.finish("generator.0")
    assert scene.flow.buffer.missing(0) == [] and scene.flow.buffer.missing(1) == []
    again = [g for g in scene.flow.buffer.take(0) + scene.flow.buffer.take(1) if g.ticket in lost]
    assert again and all(group.issue == 2 for group in again)


async def test_a_late_answer_of_a_lost_replica_is_not_taken() -> None:
    scene = Scene()
    await scene.flow.pump()
    request = scene.fleet.requests("generator.1")[0]
    scene.flow.on_replica_lost("generator.1", "gone")
    await scene.flow.on_generated("generator.1", [completed(request)])
    assert not [m for _, m in scene.fleet.sent if isinstance(m, Score)]


async def test_a_new_reward_executor_gets_what_the_old_one_owed_and_counts_it_once() -> None:
    scene = Scene()
    await scene.flow.pump()
    request = scene.fleet.requests("generator.0")[0]
    await scene.flow.on_generated("generator.0", [completed(request)])
    await scene.flow.on_reward_ready()
    asked = [m for _, m in scene.fleet.sent if isinstance(m, Score)]
    assert [item.group_id for message in asked for item in message.items] == [request.group_id] * 2
    for _ in range(2):
        scene.flow.on_scored([scores(Purpose.TRAIN, request.group_id, 3)])
    assert len(scene.flow.buffer) == 1


async def test_whatever_is_on_its_way_at_the_end_gets_a_status() -> None:
    scene = Scene()
    await scene.flow.pump()
    requests = scene.fleet.requests("generator.0")
    await scene.flow.on_generated("generator.0", [completed(r) for r in requests])
    scene.flow.on_scored([scores(Purpose.TRAIN, requests[0].group_id, 3)])
    assert scene.flow.abandon_all("the run was stopped") == 4
    assert sorted(record.group_id for record in scene.records) == [0, 1, 2, 3]
    assert {record.status for record in scene.records} == {Status.ABANDONED}
    assert len([r for r in scene.records if r.completions]) == 1  # the one that was scored


async def test_an_evaluation_goes_first_and_ends_with_its_share_of_right_answers() -> None:
    scene = Scene(heldout=4)
    assert scene.heldout.begin(version=0, first_id=10) == 14
    await scene.flow.pump()
    first = scene.fleet.requests("generator.0")[0]
    assert (first.purpose, first.group_id) == (Purpose.EVAL, 10)
    for replica in scene.replicas:
        await scene.finish(replica)
    settled = scene.heldout.settle(trainer_version=0)
    assert settled is not None
    version, metrics = settled
    assert version == 0 and metrics["eval/heldout/avg@1"] == 1.0
    assert metrics["eval/heldout/num_correct"] == metrics["eval/heldout/num_prompts"] == 4
    assert [r.status for r in scene.records] == [Status.EVALUATION] * 4
    assert scene.heldout.results == [(0, 1.0)]


async def test_evaluation_groups_of_a_lost_replica_move_to_the_other_one() -> None:
    scene = Scene(heldout=4)
    scene.heldout.begin(version=0, first_id=0)
    await scene.flow.pump()
    scene.replicas["generator.1"].ready = False
    scene.flow.on_replica_lost("generator.1", "gone")
    await scene.flow.pump()
    await scene.finish("generator.0")
    assert scene.heldout.settle(trainer_version=0) is not None


async def test_an_evaluation_whose_weights_are_gone_is_given_up() -> None:
    scene = Scene(heldout=4)
    scene.heldout.begin(version=0, first_id=0)
    await scene.flow.pump()
    for name, replica in scene.replicas.items():
        replica.ready = False
        scene.flow.on_replica_lost(name, "gone")
    assert not scene.heldout.is_over(trainer_version=0)  # it can still be done
    assert scene.heldout.is_over(trainer_version=1)  # newer weights only from now on
    assert scene.heldout.settle(trainer_version=1) is None
    assert scene.heldout.current is None


async def test_groups_at_the_trainer_are_abandoned_unless_they_are_booked() -> None:
    scene = Scene()
    await scene.flow.pump()
    for replica in scene.replicas:
        await scene.finish(replica)
    assert [group.ticket for group in scene.flow.take(0)] == [0, 1]
    scene.flow.booked()
    assert [group.ticket for group in scene.flow.take(1)] == [2, 3]
    assert scene.flow.abandon_all("trainer rank 0 on here: died") == 2
    assert [record.group_id for record in scene.records] == [2, 3]


async def test_answers_to_an_evaluation_that_was_given_up_count_for_no_other_one() -> None:
    scene = Scene(heldout=4)
    scene.heldout.begin(version=0, first_id=0)
    await scene.flow.pump()
    scene.replicas["generator.1"].ready = False
    scene.flow.on_replica_lost("generator.1", "gone")
    scene.replicas["generator.0"].version = 1
    assert scene.heldout.is_over(trainer_version=1)
    scene.heldout.settle(trainer_version=1)
    late = [r for r in scene.fleet.requests("generator.0") if r.purpose is Purpose.EVAL]
    assert scene.heldout.begin(version=1, first_id=4) == 8
    for request in late:
        await scene.flow.on_generated("generator.0", [completed(request)])
        scene.flow.on_scored([scores(Purpose.EVAL, request.group_id, 1)])
    dropped = [r for r in scene.records if r.status is Status.DROPPED]
    assert len(dropped) == len(late) == 2
    assert {r.reason for r in dropped} == {"its evaluation was given up"}
    assert not scene.heldout.current.is_complete


async def test_failing_scores_are_told_at_the_first_and_then_ever_more_rarely(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene()
    await scene.flow.pump()
    for replica in scene.replicas:
        for request in scene.fleet.requests(replica):
            await scene.flow.on_generated(replica, [completed(request)])
            bad = scores(Purpose.TRAIN, request.group_id, 3)
            scene.flow.on_scored([msgspec.structs.replace(bad, error="ZeroDivisionError")])
    assert [record.args[0] for record in caplog.records] == [1, 2, 4]
    assert all(group.failed for group in scene.flow.take(0))


async def test_waiting_for_an_answer_is_measured_by_a_clock_that_nobody_sets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, now = Scene(), time.time()
    await scene.flow.pump()
    monkeypatch.setattr(time, "time", lambda: now + 1e6)  # the laptop slept, or the date was wrong
    assert scene.flow.oldest_request_s("generator.0") < 60
    request = scene.fleet.requests("generator.0")[0]
    await scene.flow.on_generated("generator.0", [completed(request)])
    assert 0 <= scene.flow.oldest_request_s("reward") < 60
    monkeypatch.setattr(time, "monotonic", lambda clock=time.monotonic: clock() + 7200)
    assert scene.flow.oldest_request_s("reward") > 7000
    await scene.flow.on_reward_ready()  # the new one has only just been asked
    assert scene.flow.oldest_request_s("reward") < 60
