"""experiments/single_process_loop.py against the engine that the pipeline uses: equal bits."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny_model import write_tiny_model
from tiny_policy import random_batch, tiny_config

from llamarl_hpc.batching.buffer import ScoredGroup, make_train_batch
from llamarl_hpc.batching.credit import CreditRules
from llamarl_hpc.config.load import load_config
from llamarl_hpc.placement import World
from llamarl_hpc.training.engine import TrainerEngine
from llamarl_hpc.training.optimizer import build_optimizer
from llamarl_hpc.training.policy import build_policy

LOOP = Path(__file__).parents[2] / "experiments" / "single_process_loop.py"


@pytest.fixture(scope="module")
def oracle() -> ModuleType:
    spec = importlib.util.spec_from_file_location("single_process_loop", LOOP)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "settings",
    [
        {"zero_stage": 0},
        {"zero_stage": 1},
        {"zero_stage": 1, "weight_decay": 0.1, "micro_batch_tokens": 40},
        {"zero_stage": 1, "max_grad_norm": 0.0, "warmup_steps": 3},
        {"zero_stage": 1, "share_prompt": False, "gradient_checkpointing": True},
        {"zero_stage": 2, "algorithm": {"loss_type": "ppo"}},
        {"zero_stage": 1, "micro_batch_tokens": 40, "algorithm": {"loss_type": "gspo"}},
        {"zero_stage": 1, "algorithm": {"loss_type": "dr_grpo", "entropy_coef": 0.01}},
    ],
)
def test_the_visible_loop_makes_the_same_weights_bit_for_bit(
    oracle: ModuleType, world: World, model_folder: Path, settings: dict[str, Any]
) -> None:
    config = tiny_config(**settings)
    engine = TrainerEngine(config, world, model_folder)
    policy = build_policy(config, model_folder)
    optimizer = build_optimizer(policy, config.trainer)
    for step in range(4):
        batch = random_batch(seed=step, step=step, temperature=0.9)
        theirs = engine.train_step(batch).metrics
        figures, grad_norm = oracle.train_step(policy, optimizer, batch, step, config)
        assert figures.loss.hex() == theirs["loss"].hex()
        assert grad_norm.hex() == theirs["grad_norm"].hex()
    for name, tensor in engine.export_state_dict():
        assert torch.equal(tensor, policy.parameter_names()[name]), name


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "model", initializer_range=0.08)
    reward = tmp_path / "digits.py"
    reward.write_text(
        "def digits(prompts, completions, **columns):\n"
        "    return [sum(c in '2468' for c in text) / 4 for text in completions]\n"
    )
    config = {
        "model": {"path": str(tmp_path / "model")},
        "data": {"tasks": [{"name": "chain_sum"}], "size": 32},
        "rollout": {
            "num_generations": 4,
            "prompts_per_step": 3,
            "max_prompt_length": 120,
            "max_completion_length": 12,
            "temperature": 1.1,
        },
        "rewards": [{"kind": "python", "function": f"{reward}:digits"}],
        "algorithm": {"max_staleness": 0},
        "trainer": {"learning_rate": 1e-3, "micro_batch_tokens": 256, "max_steps": 3},
        "evaluation": {"num_prompts": 0},
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return path


def test_the_loop_equals_the_parts_of_the_pipeline_in_turn(
    oracle: ModuleType, world: World, config_file: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["loop", str(config_file), "--set", "data.seed=7"])
    oracle.main()
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["policy_version"] for r in records] == [1, 2, 3]
    assert len({r["loss"] for r in records}) == 3  # and so there was something to learn

    config = load_config(config_file, ["data.seed=7"])
    model_folder = Path(config.model.path)
    prompts = oracle.load_prompts(config, model_folder).train
    cursor = oracle.PromptCursor(prompts, seed=7, shuffle=True)
    rewards = oracle.build_rewards(config.rewards)
    generator = oracle.NativeEngine(
        model_folder, dtype="fp32", max_concurrency=64, prefill_tokens=2048, max_context=132
    )
    engine = TrainerEngine(config, world, model_folder)
    for step, record in enumerate(records):
        questions = [cursor.next() for _ in range(3)]
        groups = []
        for i in (2, 0, 1):  # whatever order they come back in
            ticket, question = 3 * step + i, questions[i]
            generator.submit(request_of(config, ticket, question))
            (done,) = finish(generator)
            reward = oracle.score(rewards, question, done.completions)
            groups.append(scored(ticket, question, done.completions, reward))
        batch = make_train_batch(
            sorted(groups, key=lambda group: group.ticket),
            step=step,
            temperature=1.1,
            rules=CreditRules.of(config),
        )
        metrics = engine.train_step(batch).metrics
        # the generator's figures may depend on its batch mates by rounding on some machines
        assert metrics["loss"] == pytest.approx(record["loss"], abs=1e-6)
        assert metrics["tokens/trained"] == record["tokens/trained"]
        generator.load_weights(step + 1, engine.export_state_dict())


def request_of(config: Any, ticket: int, question: Any) -> Any:
    from llamarl_hpc.types import GenerationRequest, Purpose, SamplingParams

    return GenerationRequest(
        purpose=Purpose.TRAIN,
        group_id=ticket,
        prompt_ids=question.token_ids,
        num_generations=4,
        sampling=SamplingParams(temperature=1.1, max_tokens=12, seed=config.rollout.seed),
    )


def finish(generator: Any) -> list[Any]:
    while not (done := generator.step()):
        continue
    return list(done)


def scored(ticket: int, question: Any, completions: Any, reward: list[float]) -> ScoredGroup:
    return ScoredGroup(
        ticket=ticket,
        issue=1,
        prompt=question,
        generator="generator.0",
        completions=completions,
        rewards={"digits": list(reward)},
        reward=reward,
        error="",
        t_issued=0.0,
        t_generated=0.0,
        t_scored=0.0,
    )
