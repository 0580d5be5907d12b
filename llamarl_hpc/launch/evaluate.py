"""Measure a model folder on the held-out questions, with one engine in this process."""

from __future__ import annotations

import os
import time
from typing import Any

from llamarl_hpc.batching.buffer import ScoredGroup
from llamarl_hpc.channels.messages import ScoreItem
from llamarl_hpc.config.schema import Config
from llamarl_hpc.controller.evaluation import Evaluation
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.generation.native.engine import NativeEngine
from llamarl_hpc.models.load import resolve_model
from llamarl_hpc.placement import device_of, row_length
from llamarl_hpc.prompts.dataset import PromptSet, load_prompts
from llamarl_hpc.rewards.pool import RewardPool
from llamarl_hpc.types import GenerationRequest, GroupCompletions, Purpose, SamplingParams


def evaluate_model(config: Config) -> dict[str, Any]:
    """avg@k, pass@k, counts, mean length and speed. Raises ConfigError."""
    import torch

    folder = resolve_model(config.model.path)
    prompts = load_prompts(config, folder).heldout
    if not len(prompts):
        raise ConfigError(
            "there are no held-out questions; set evaluation.num_prompts or data.eval_path"
        )
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    engine = NativeEngine(
        folder,
        dtype=config.generator.dtype,
        max_concurrency=config.generator.max_concurrency,
        prefill_tokens=config.generator.prefill_tokens,
        max_context=row_length(config),
        device=device_of(config, "generator"),
        int8=config.generator.quantization == "int8",
    )
    start = time.monotonic()
    groups = _generate(engine, prompts, config)
    seconds = time.monotonic() - start
    verifiable = next((r for r in config.rewards if r.kind == "math_answer"), config.rewards[0])
    evaluation = Evaluation(
        0, [prompts[i] for i in range(len(prompts))], first_id=0, component=verifiable.name or ""
    )
    for group in _score(groups, prompts, config):
        evaluation.add(group)
    metrics = evaluation.metrics()
    k = config.evaluation.num_generations
    return {
        "model": str(folder),
        "k": k,
        "avg": metrics[f"eval/heldout/avg@{k}"],
        "pass": metrics[f"eval/heldout/pass@{k}"],
        "num_prompts": int(metrics["eval/heldout/num_prompts"]),
        "num_correct": metrics["eval/heldout/num_correct"],
        "mean_length": metrics["eval/heldout/mean_length"],
        "tokens_per_second": engine.tokens_processed / seconds,
    }


def _generate(engine: NativeEngine, prompts: PromptSet, config: Config) -> list[GroupCompletions]:
    sampling = SamplingParams(
        temperature=config.evaluation.temperature,
        max_tokens=config.rollout.max_completion_length,
        seed=config.evaluation.seed,
    )
    for number in range(len(prompts)):
        engine.submit(
            GenerationRequest(
                purpose=Purpose.EVAL,
                group_id=number,
                prompt_ids=prompts[number].token_ids,
                num_generations=config.evaluation.num_generations,
                sampling=sampling,
            )
        )
    groups: list[GroupCompletions] = []
    while engine.num_running or engine.num_waiting:
        groups += engine.step()
    return groups


def _score(groups: list[GroupCompletions], prompts: PromptSet, config: Config) -> list[ScoredGroup]:
    done = {group.group_id: group for group in groups}
    pool = RewardPool(config)
    scored: list[ScoredGroup] = []
    try:
        for number, group in done.items():
            pool.submit(
                ScoreItem(
                    purpose=Purpose.EVAL,
                    group_id=number,
                    prompt=prompts[number].text,
                    columns=dict(prompts[number].columns),
                    completions=[c.text for c in group.completions],
                )
            )
        while len(scored) < len(done):
            for scores in pool.collect(timeout_s=1.0):
                now = time.time()
                scored.append(
                    ScoredGroup(
                        ticket=scores.group_id,
                        issue=1,
                        prompt=prompts[scores.group_id],
                        generator="",
                        completions=done[scores.group_id].completions,
                        rewards=scores.components,
                        reward=scores.total,
                        error=scores.error,
                        t_issued=now,
                        t_generated=now,
                        t_scored=now,
                    )
                )
    finally:
        pool.close()
    return scored
