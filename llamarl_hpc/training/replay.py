"""The loss of a step once more, from what the rollout store keeps: no model, no ranks.

What the trainer computed with is all there: tokens, mask, advantages, and the log-probs of both
policies. So the loss must come out as it was logged, whatever its type.
"""

from __future__ import annotations

import numpy as np
import torch

from llamarl_hpc.batching.buffer import split_by_rollout
from llamarl_hpc.batching.credit import CreditRules, assign_credit, divergence
from llamarl_hpc.batching.packing import (
    micro_batches_of_rank,
    rollouts_with_gradient,
    token_weights,
)
from llamarl_hpc.config.losses import LossSettings
from llamarl_hpc.config.schema import Config
from llamarl_hpc.errors import StoreError
from llamarl_hpc.training.loss import micro_batch_loss
from llamarl_hpc.training.loss_sums import LossSums
from llamarl_hpc.types import Array, TrainBatch


def replay_loss(batch: TrainBatch, logprobs: Array, entropy: Array, config: Config) -> LossSums:
    """Figures of the loss of `batch`, given the trainer's log-probs and entropies [N].

    NaN log-probs mark rollouts that were left out of the pass (`trainer.skip_zero_advantage`):
    they count in the denominators, and add nothing. Raises StoreError when a value is missing of
    a rollout that did add something.
    """
    settings = LossSettings.of(config.algorithm)
    weights = token_weights(
        batch,
        aggregation=settings.aggregation,
        max_completion_length=config.rollout.max_completion_length,
    )
    rollout = np.repeat(np.arange(len(batch.completion_lengths)), batch.completion_lengths)
    everywhere = settings.pulls_everywhere
    must = rollouts_with_gradient(batch, weights, entropy_bonus=everywhere)[rollout] & (weights > 0)
    _check_known("trainer's log-prob", logprobs, must, batch.step)
    if settings.entropy_coef > 0.0:
        _check_known("trainer's entropy", entropy, must, batch.step)
    if settings.beta > 0.0:
        reference = batch.logprobs_reference
        missing = np.full_like(logprobs, np.nan) if reference is None else reference
        _check_known("reference's log-prob", missing, must, batch.step)
    computed = np.bincount(rollout, weights=np.isnan(logprobs)) == 0
    sums = None
    for micro_batch in micro_batches_of_rank(
        batch,
        weights,
        needed=computed,
        rank=0,
        num_ranks=1,
        micro_batch_tokens=config.trainer.micro_batch_tokens,
        share_prompt=config.trainer.share_prompt,
    ):
        tokens = micro_batch.flat_index
        if not len(tokens):  # a dummy
            logprobs_K, entropy_K = (np.zeros(1, np.float32) for _ in range(2))
        else:
            logprobs_K, entropy_K = logprobs[tokens], np.nan_to_num(entropy[tokens])
        _, figures = micro_batch_loss(
            micro_batch,
            torch.from_numpy(logprobs_K),
            torch.from_numpy(entropy_K),
            settings=settings,
        )
        sums = figures if sums is None else sums + figures
    assert sums is not None, "there is at least a dummy"
    return sums


def _check_known(name: str, values: Array, must: Array, step: int) -> None:
    missing = int((must & np.isnan(values)).sum())
    if missing:
        raise StoreError(
            f"the store lacks the {name} of {missing} tokens that the loss of step "
            f"{step} counted; it cannot be computed again"
        )


def advantages_again(batch: TrainBatch, rewards: Array, truncated: Array, config: Config) -> Array:
    """The advantages [R] that the run's rules give for stored rewards [R], float32."""
    rules = CreditRules.of(config)
    edges = np.cumsum(np.bincount(batch.group_index))[:-1]
    values, lengths, cut = (
        [part.tolist() for part in np.split(column, edges)]
        for column in (rewards, batch.completion_lengths, truncated)
    )
    credit = assign_credit(
        values,
        lengths,
        cut,
        rules,
        _divergences(batch, rules, edges) if rules.beta > 0.0 else None,
        failed=_failed(batch, truncated & (rules.truncated_completions != "keep"), edges),
    )
    return credit.advantages.astype(np.float32)


def _failed(batch: TrainBatch, excused: Array, edges: Array) -> list[bool]:
    """Of each group, whether its scoring failed: no completion was trained, and not because all
    are `excused`. Where all are, failed or not makes a difference to others' advantages only, and
    its own, which are exactly 0 if it failed."""
    starts = np.cumsum(batch.completion_lengths, dtype=np.int64) - batch.completion_lengths
    trained = np.logical_or.reduceat(batch.loss_mask, starts)
    columns = (np.split(column, edges) for column in (trained, excused, batch.advantages))
    return [
        bool(not t.any() and (not e.all() or not a.any())) for t, e, a in zip(*columns, strict=True)
    ]


def _divergences(batch: TrainBatch, rules: CreditRules, edges: Array) -> list[list[float]]:
    reference = batch.logprobs_reference
    if reference is None:
        raise StoreError(
            f"the store lacks the reference's log-probs of step {batch.step}, which its rewards "
            "were lowered by; its advantages cannot be computed again"
        )
    pairs = zip(
        *(split_by_rollout(flat, batch) for flat in (batch.logprobs, reference)), strict=True
    )
    sums = np.array([divergence(mu, ref, rules.kl_estimator) for mu, ref in pairs])
    return [part.tolist() for part in np.split(sums, edges)]
