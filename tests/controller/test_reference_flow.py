"""Scored groups on their way through the reference: which one, when, and what is owed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_rollouts import FakeFleet, completed, prompt

from llamarl_hpc.batching.buffer import ScoredGroup
from llamarl_hpc.channels.messages import LoadReference, Refer, Referred
from llamarl_hpc.config.schema import Config
from llamarl_hpc.controller.busy import BusyClock
from llamarl_hpc.controller.reference import ReferenceFlow, ReferenceModels, reference_step
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.types import GenerationRequest, Purpose, ReferenceLogprobs, SamplingParams


def config_of(update_steps: int = 0, beta: float = 0.1) -> Config:
    return Config.model_validate(
        {
            "algorithm": {"beta": beta},
            "reference": {"placement": "executor", "update_steps": update_steps},
        }
    )


def scored(ticket: int) -> ScoredGroup:
    request = GenerationRequest(
        purpose=Purpose.TRAIN,
        group_id=ticket,
        prompt_ids=prompt(ticket).token_ids,
        num_generations=2,
        sampling=SamplingParams(temperature=1.0, max_tokens=4),
    )
    return ScoredGroup(
        ticket=ticket,
        issue=1,
        prompt=prompt(ticket),
        generator="generator.0",
        completions=completed(request).completions,
        rewards={},
        reward=[0.0, 1.0],
        error="",
        t_issued=0.0,
        t_generated=0.0,
        t_scored=0.0,
    )


class Scene:
    """A flow with two tickets a step."""

    def __init__(self, folder: Path, update_steps: int = 0) -> None:
        config = config_of(update_steps)
        self.fleet, self.done = FakeFleet(), list[ScoredGroup]()
        self.models = ReferenceModels(config, folder, step=0)
        self.flow = ReferenceFlow(
            config,
            self.models,
            fleet=self.fleet,  # type: ignore[arg-type]
            busy=BusyClock(),
            step_of=lambda ticket: ticket // 2,
            put=self.done.append,
        )

    def asked(self) -> list[list[int]]:
        """Tickets of every request, in order."""
        messages = [message for name, message in self.fleet.sent if name == "reference"]
        return [[i.group_id for i in m.items] for m in messages if isinstance(m, Refer)]

    def answer(self, *tickets: int) -> None:
        logprobs = [np.array([-0.5, -0.25], np.float32)] * 2
        groups = [ReferenceLogprobs(group_id=ticket, logprobs=logprobs) for ticket in tickets]
        self.flow.on_referred(Referred(step=self.models.step, groups=groups, seconds=0.0))


@pytest.mark.parametrize(
    ("update_steps", "steps"), [(0, [0, 0, 0, 0, 0]), (1, [0, 1, 2, 3, 4]), (2, [0, 0, 2, 2, 4])]
)
def test_the_reference_of_a_step_is_the_policy_of_the_newest_update(
    update_steps: int, steps: list[int]
) -> None:
    assert [reference_step(step, update_steps) for step in range(5)] == steps


async def test_groups_are_asked_about_together_and_come_out_with_their_logprobs(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path)
    for ticket in (1, 0, 9):
        scene.flow.add(scored(ticket))
    await scene.flow.pump()
    await scene.flow.pump()
    assert scene.asked() == [[0, 1, 9]] and scene.flow.tickets() == [0, 1, 9]
    scene.answer(9, 0)
    scene.answer(0)  # twice: it was asked again after a loss
    assert [group.ticket for group in scene.done] == [9, 0]
    assert scene.done[0].logprobs_reference[1].tolist() == [-0.5, -0.25]
    assert [group.ticket for group in scene.flow.drain()] == [1]
    assert scene.flow.tickets() == [] and scene.flow.oldest_request_s() == 0.0


async def test_an_executor_that_is_up_again_gets_its_model_and_what_it_owes(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path, update_steps=2)
    scene.models.step = 2
    for ticket in (4, 5):
        scene.flow.add(scored(ticket))
    await scene.flow.pump()
    scene.answer(4)
    await scene.flow.on_ready()
    sent = [message for _, message in scene.fleet.sent]
    assert isinstance(sent[1], LoadReference) and sent[1].folder == f"{tmp_path}/step_000002"
    assert scene.asked() == [[4, 5], [5]]


async def test_groups_of_later_steps_wait_for_the_reference_that_is_not_there_yet(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path, update_steps=2)
    for ticket in range(6):  # steps 0, 0, 1, 1, 2, 2
        scene.flow.add(scored(ticket))
    await scene.flow.pump()
    assert scene.asked() == [[0, 1, 2, 3]]
    scene.answer(0, 1, 2, 3)
    assert not scene.models.is_due(1) and scene.models.is_due(2)
    scene.models.step = 2
    await scene.flow.on_update()
    await scene.flow.pump()
    kinds = [type(message).__name__ for _, message in scene.fleet.sent]
    assert kinds == ["Refer", "LoadReference", "Refer"] and scene.asked()[1] == [4, 5]
    assert not scene.models.is_due(2)


def test_folders_that_no_resume_can_need_are_removed(tmp_path: Path) -> None:
    models = ReferenceModels(config_of(update_steps=2), tmp_path, step=0)
    for step in (2, 4, 6, 8):
        models.path(step).mkdir()
    models.step = 8
    models.prune([7, 5])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step_000004",
        "step_000006",
        "step_000008",
    ]


def test_a_resume_wants_the_reference_of_its_step(tmp_path: Path) -> None:
    config = config_of(update_steps=4)
    with pytest.raises(ConfigError, match=r"reference of step 6 should be in .*step_000004"):
        ReferenceModels(config, tmp_path, step=6)
    (tmp_path / "step_000004").mkdir()
    assert ReferenceModels(config, tmp_path, step=6).step == 4
    assert ReferenceModels(config, tmp_path, step=3).load() is None
    assert ReferenceModels(config_of(update_steps=4, beta=0.0), tmp_path, step=9).step == 0
