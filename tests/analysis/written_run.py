"""A run folder whose completions and rewards a test makes up: what they say is all that counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from synthetic_run import begin_attempt, end_attempt

from llamarl_hpc.config.schema import Config
from llamarl_hpc.observability.metrics_file import MetricsFile
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.storage.atomic import write_json
from llamarl_hpc.storage.records import GroupRecord
from llamarl_hpc.storage.rollout_store import RolloutWriter
from llamarl_hpc.types import Completion, FinishReason, Prompt, Purpose, Status, VersionSpan

T0 = 1.7e9


@dataclass(frozen=True)
class Answer:
    """One completion of the made-up policy."""

    text: str
    rewards: dict[str, float]
    truncated: bool = False


Policy = Callable[[np.random.Generator, float, int], Answer]
"""(random numbers, progress 0..1, right answer) -> completion."""


@dataclass(frozen=True)
class Script:
    """What the run does. `accuracy` gives the held-out accuracy by progress; None: not measured."""

    policy: Policy
    accuracy: Callable[[float], float] | None = None
    steps: int = 16
    prompts: int = 4
    generations: int = 4
    heldout: int = 400


def write_run(path: Path, script: Script) -> RunDir:
    run = RunDir.create_at(path)
    config = Config(name="made-up").model_dump(mode="json")
    config["data"]["path"] = "/data/train.jsonl"
    run.config.write_text(yaml.safe_dump(config))
    write_json(run.run_json, {"run_id": path.name, "name": "made-up", "attempts": []})
    begin_attempt(run, 1, resumed_from_step=0, started=T0)
    metrics = MetricsFile(run.metrics, attempt=1)
    writer = RolloutWriter(
        run.rollouts, attempt=1, config=Config().storage, attributes={}, reward_names=[]
    )
    for step in range(script.steps):
        progress = step / (script.steps - 1)
        groups = [_group(script, step, index, progress) for index in range(script.prompts)]
        for group in groups:
            writer.append(group)
        rewards = [reward for group in groups for reward in group.reward]
        metrics.step(step, {"reward/mean": float(np.mean(rewards)), "time/step": 1.0})
        if script.accuracy is not None and step % 3 == 0:
            _evaluate(script, writer, metrics, step, script.accuracy(progress))
    writer.close()
    metrics.close()
    end_attempt(run, 1, "done", ended=T0 + script.steps)
    return run


def _group(script: Script, step: int, index: int, progress: float) -> GroupRecord:
    number = step * script.prompts + index
    rng = np.random.default_rng(number)
    right = int(rng.integers(100, 1000))
    answers = [script.policy(rng, progress, right) for _ in range(script.generations)]
    totals = [sum(answer.rewards.values()) for answer in answers]
    return GroupRecord(
        purpose=Purpose.TRAIN,
        group_id=number,
        attempt=1,
        issue=1,
        prompt=_prompt(number, right),
        status=Status.TRAINED,
        step=step,
        generator="generator.0",
        staleness=0,
        completions=[_completion(answer, step) for answer in answers],
        rewards={name: [a.rewards[name] for a in answers] for name in answers[0].rewards},
        reward=totals,
        advantage=[total - float(np.mean(totals)) for total in totals],
        t_issued=T0 + step,
        t_resolved=T0 + step + 0.9,
    )


def _prompt(number: int, right: int) -> Prompt:
    return Prompt(
        prompt_id=f"{number:08x}",
        epoch=0,
        text=f"What is {right - 7} + 7?\n",
        token_ids=np.arange(4, dtype=np.int32),
        columns={"question": f"{right - 7} + 7", "answer": str(right)},
    )


def _completion(answer: Answer, step: int) -> Completion:
    length = max(1, len(answer.text) // 4)
    return Completion(
        token_ids=np.arange(length, dtype=np.int32),
        logprobs=np.full(length, -1.0, dtype=np.float32),
        versions=[VersionSpan(0, length, step)],
        finish_reason=FinishReason.LENGTH if answer.truncated else FinishReason.STOP,
        text=answer.text,
        t_start=T0 + step,
        t_end=T0 + step + 0.5,
    )


def _evaluate(
    script: Script, writer: RolloutWriter, metrics: MetricsFile, version: int, accuracy: float
) -> None:
    """The first questions are right; two in a hundred of them get rollouts."""
    correct = round(accuracy * script.heldout)
    for question in range(0, script.heldout, 50):
        right = question < correct
        writer.append(
            GroupRecord(
                purpose=Purpose.EVAL,
                group_id=version * script.heldout + question,
                attempt=1,
                issue=1,
                prompt=_prompt(100_000 + question, 500 + question),
                status=Status.EVALUATION,
                step=version,
                completions=[_completion(Answer("right" if right else "wrong", {}), version)],
                reward=[float(right)],
                advantage=[0.0],
                t_issued=T0 + version,
                t_resolved=T0 + version,
            )
        )
    metrics.event(
        "eval",
        policy_version=version,
        metrics={
            "eval/heldout/avg@1": correct / script.heldout,
            "eval/heldout/num_prompts": script.heldout,
            "eval/heldout/num_correct": correct,
        },
    )


def words_of(rng: np.random.Generator, count: int, vocabulary: Sequence[str] = ()) -> str:
    """Some words in a random order: prose that does not repeat itself."""
    chosen = vocabulary or [f"word{i}" for i in range(400)]
    return " ".join(chosen[i] for i in rng.integers(0, len(chosen), count))
