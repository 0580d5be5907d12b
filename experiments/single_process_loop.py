"""The oracle: RL of a language model in one process, one visible loop, no DeepSpeed, no messages.

    python experiments/single_process_loop.py experiments/quickstart.yaml --set trainer.max_steps=3

It reads the same configuration as `llamarl-hpc run` and uses the same model, generator, rewards
and loss; everything between them is spelt out below. With `algorithm.max_staleness: 0` and one
rank of each executor the distributed pipeline must give the same losses, bit for bit. One JSON
object per step goes to standard output, floats also in hexadecimal.

Letters: G prompts of a step, R completions of all of them, N tokens of all completions.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llamarl_hpc.batching.credit import Credit, CreditRules, assign_credit, divergence
from llamarl_hpc.batching.packing import (
    micro_batches_of_rank,
    rollouts_with_gradient,
    token_weights,
)
from llamarl_hpc.config.load import load_config
from llamarl_hpc.config.losses import LossSettings
from llamarl_hpc.config.schema import Config
from llamarl_hpc.generation.native.engine import NativeEngine
from llamarl_hpc.models.int8 import quantised
from llamarl_hpc.models.load import resolve_model
from llamarl_hpc.placement import row_length
from llamarl_hpc.prompts.cursor import PromptCursor
from llamarl_hpc.prompts.dataset import load_prompts
from llamarl_hpc.rewards.base import NamedReward, build_rewards, call, total
from llamarl_hpc.training.loss import micro_batch_loss
from llamarl_hpc.training.loss_sums import LossSums
from llamarl_hpc.training.optimizer import build_optimizer, learning_rate
from llamarl_hpc.training.policy import PolicyModel, build_policy, forward_inputs
from llamarl_hpc.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    Prompt,
    Purpose,
    SamplingParams,
    TrainBatch,
)


def train_loop(config: Config) -> Iterator[dict[str, Any]]:
    """Run `trainer.max_steps` steps; yields what is worth knowing about each."""
    model_folder = resolve_model(config.model.path)
    prompts = load_prompts(config, model_folder).train
    cursor = PromptCursor(prompts, seed=config.data.seed, shuffle=config.data.shuffle)
    rewards = build_rewards(config.rewards, config.data.answer)
    torch.use_deterministic_algorithms(config.trainer.deterministic, warn_only=True)
    if config.trainer.deterministic:  # MKL: equal sums wherever an array lies in memory
        os.environ.setdefault("MKL_CBWR", "AUTO")

    # The policy exists twice: one copy draws completions, the other one is trained.
    generator = NativeEngine(
        model_folder,
        dtype=config.generator.dtype,
        max_concurrency=config.generator.max_concurrency,
        prefill_tokens=config.generator.prefill_tokens,
        max_context=row_length(config),
        int8=config.generator.quantization == "int8",
    )
    policy = build_policy(config, model_folder)
    reference = None  # a third copy, frozen, if there is a KL term
    if config.algorithm.beta > 0.0:
        reference = build_policy(config, resolve_model(config.reference.path or config.model.path))
    optimizer = build_optimizer(policy, config.trainer)
    version = 0  # of the policy: optimizer steps applied
    ticket = 0  # number of the next prompt; it and the seed fix every random draw
    rules = dataclasses.replace(CreditRules.of(config), beta=0.0)

    for step in range(config.trainer.max_steps):
        start = time.perf_counter()
        questions: list[Prompt] = []
        answers: list[list[Completion]] = []
        scores: list[list[float]] = []
        num_replaced = 0  # groups without spread that made room for another prompt
        while (num_wanted := config.rollout.prompts_per_step - len(questions)) > 0:
            drawn = [cursor.next() for _ in range(num_wanted)]
            completed = generate(generator, drawn, ticket, config)
            ticket += num_wanted
            for question, completions in zip(drawn, completed, strict=True):
                rewarded = score(rewards, question, completions)
                is_constant = credit([completions], [rewarded], rules).constant[0]
                if is_constant and num_replaced < max_resamples(config):
                    num_replaced += 1
                    continue
                questions.append(question)
                answers.append(completions)
                scores.append(rewarded)
        batch = make_batch(step, version, questions, answers, scores, config)
        if reference is not None:
            update_steps = config.reference.update_steps
            if update_steps and step % update_steps == 0:
                reference.load_state_dict(policy.state_dict())
            logprobs_N = reference_logprobs(reference, batch, config)
            batch = make_batch(step, version, questions, answers, scores, config, logprobs_N)
        figures, grad_norm = train_step(policy, optimizer, batch, version, config)
        if grad_norm is not None:
            version += 1
            weights: Iterable[tuple[str, Tensor]] = policy.parameter_names().items()
            if config.generator.quantization == "int8":
                weights = quantised(weights)
            generator.load_weights(version, weights)
        yield {
            "step": step,
            "policy_version": version,
            "reward/mean": float(np.mean(scores)),
            "dynamic_sampling/replaced": num_replaced,
            "grad_norm": grad_norm or 0.0,
            **figures.metrics(),
            "seconds": time.perf_counter() - start,
        }


def generate(
    generator: NativeEngine, questions: Sequence[Prompt], first_id: int, config: Config
) -> list[list[Completion]]:
    """`num_generations` completions of every question, all by the current policy."""
    torch.set_num_threads(config.resources.generator.cpus_per_task)
    for i, question in enumerate(questions):
        request = GenerationRequest(
            purpose=Purpose.TRAIN,
            group_id=first_id + i,  # seed and group id fix every random draw
            prompt_ids=question.token_ids,
            num_generations=config.rollout.num_generations,
            sampling=SamplingParams(
                temperature=config.rollout.temperature,
                top_p=config.rollout.top_p,
                max_tokens=config.rollout.max_completion_length,
                seed=config.rollout.seed,
            ),
        )
        generator.submit(request)
    done: dict[int, list[Completion]] = {}
    while len(done) < len(questions):
        done |= {group.group_id: group.completions for group in generator.step()}
    return [done[first_id + i] for i in range(len(questions))]


def score(
    rewards: Sequence[NamedReward], question: Prompt, answers: Sequence[Completion]
) -> list[float]:
    """The reward of every answer: the weighted sum of the components."""
    texts = [answer.text for answer in answers]
    components = [call(reward, question.text, texts, question.columns) for reward in rewards]
    return total([reward.weight for reward in rewards], components)


def make_batch(
    step: int,
    version: int,
    questions: Sequence[Prompt],
    answers: Sequence[Sequence[Completion]],
    scores: Sequence[Sequence[float]],
    config: Config,
    reference_N: np.ndarray | None = None,
) -> TrainBatch:
    """Flat arrays: prompts one after the other, completions one after the other. `reference_N`:
    log-probs of the reference, for a KL term in the loss or in the reward."""
    completions = [c for group in answers for c in group]
    lengths = np.array([len(c.token_ids) for c in completions], dtype=np.int32)
    rules, kl = CreditRules.of(config), None
    if reference_N is not None and rules.beta > 0.0:
        rows = iter(np.split(reference_N, np.cumsum(lengths)[:-1]))
        kl = [[divergence(c.logprobs, next(rows), rules.kl_estimator) for c in a] for a in answers]
    given = credit(answers, scores, rules, kl)
    spans = [span for c in completions for span in c.versions]
    versions = np.repeat([s.version for s in spans], [s.end - s.start for s in spans])
    return TrainBatch(
        step=step,
        temperature=config.rollout.temperature,
        prompt_ids=np.concatenate([q.token_ids for q in questions]),
        prompt_lengths=np.array([len(q.token_ids) for q in questions], dtype=np.int32),
        group_index=np.repeat(np.arange(len(questions), dtype=np.int32), [len(a) for a in answers]),
        completion_ids=np.concatenate([c.token_ids for c in completions]),
        completion_lengths=lengths,
        logprobs=np.concatenate([c.logprobs for c in completions]),
        loss_mask=np.repeat(given.trained, lengths),
        advantages=given.advantages.astype(np.float32),
        logprobs_reference=reference_N if kl is None else None,
        lags=(version - versions).astype(np.int32),
    )


def credit(
    answers: Sequence[Sequence[Completion]],
    scores: Sequence[Sequence[float]],
    rules: CreditRules,
    kl: Sequence[Sequence[float]] | None = None,
) -> Credit:
    """Advantages, and who is trained, by group."""
    return assign_credit(
        scores,
        [[len(c.token_ids) for c in group] for group in answers],
        [[c.finish_reason is FinishReason.LENGTH for c in group] for group in answers],
        rules,
        kl,
    )


def max_resamples(config: Config) -> int:
    """Groups that a step may replace."""
    default, number = 3 * config.rollout.prompts_per_step, config.algorithm.max_resamples
    return (default if number is None else number) if config.algorithm.dynamic_sampling else 0


def reference_logprobs(reference: PolicyModel, batch: TrainBatch, config: Config) -> np.ndarray:
    """float32 [N], of every token of the batch."""
    logprobs_N = np.zeros(len(batch.completion_ids), dtype=np.float32)
    for micro_batch in micro_batches_of_rank(
        batch,
        np.ones(len(logprobs_N)),
        rank=0,
        num_ranks=1,
        micro_batch_tokens=config.trainer.micro_batch_tokens,
        share_prompt=config.trainer.share_prompt,
    ):
        inputs = forward_inputs(micro_batch, temperature=batch.temperature, device="cpu")
        with torch.no_grad():
            logprobs_N[micro_batch.flat_index] = reference(**inputs)[0].numpy()
    return logprobs_N


def train_step(
    policy: PolicyModel,
    optimizer: torch.optim.Optimizer,
    batch: TrainBatch,
    version: int,
    config: Config,
) -> tuple[LossSums, float | None]:
    """One optimizer step; the figures of the loss, and the gradient's norm (None: no step)."""
    torch.set_num_threads(config.resources.trainer.cpus_per_task)
    settings = LossSettings.of(config.algorithm)
    weights_N = token_weights(
        batch,
        aggregation=settings.aggregation,
        max_completion_length=config.rollout.max_completion_length,
    )
    needed_R = None
    if config.trainer.skip_zero_advantage:
        everywhere = settings.pulls_everywhere
        needed_R = rollouts_with_gradient(batch, weights_N, entropy_bonus=everywhere)
    micro_batches = micro_batches_of_rank(
        batch,
        weights_N,
        needed=needed_R,
        rank=0,
        num_ranks=1,
        micro_batch_tokens=config.trainer.micro_batch_tokens,
        share_prompt=config.trainer.share_prompt,
    )
    figures: list[LossSums] = []
    optimizer.zero_grad()
    for micro_batch in micro_batches:
        inputs = forward_inputs(micro_batch, temperature=batch.temperature, device="cpu")
        logprobs, entropy = policy(**inputs)
        loss, sums = micro_batch_loss(micro_batch, logprobs, entropy, settings=settings)
        loss.backward()  # gradients add up; the weights already hold the denominators
        figures.append(sums)
    together = sum(figures[1:], start=figures[0])
    if not weights_N.any():
        return together, None

    grad_norm = gradient_norm(optimizer)
    if not math.isfinite(grad_norm):
        return together, None
    if config.trainer.max_grad_norm > 0.0:
        excess = (torch.tensor(grad_norm) + 1e-6) / config.trainer.max_grad_norm
        for parameter in policy.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1.0 / excess.clamp(min=1.0))
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config.trainer, version)
    optimizer.step()
    return together, grad_norm


def gradient_norm(optimizer: torch.optim.Optimizer) -> float:
    """Euclidean norm over all parameters; summed as ZeRO does it, or the last bit would differ."""
    group_norms = []
    for group in optimizer.param_groups:
        norms = [torch.linalg.vector_norm(p.grad.double()) for p in group["params"]]
        group_norms.append(torch.stack(norms).pow(2.0).sum().float().pow(0.5))
    return float(torch.linalg.vector_norm(torch.stack(group_norms)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    for record in train_loop(load_config(arguments.config, arguments.set)):
        record["loss_hex"] = record["loss"].hex()
        record["grad_norm_hex"] = record["grad_norm"].hex()
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
