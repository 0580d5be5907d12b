"""Figures of one optimizer step that only the controller can see, under their standard names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llamarl_hpc.batching.buffer import ScoredGroup
from llamarl_hpc.batching.credit import Credit
from llamarl_hpc.batching.staleness import staleness
from llamarl_hpc.types import FinishReason


def batch_metrics(
    groups: Sequence[ScoredGroup], *, trainer_version: int, credit: Credit
) -> dict[str, float]:
    """Rewards, lengths and staleness of a batch that is consumed at `trainer_version`."""
    completions = [c for group in groups for c in group.completions]
    lengths = np.array([len(c.token_ids) for c in completions], dtype=np.float64)
    rewards = np.array([r for group in groups for r in group.reward], dtype=np.float64)
    lags = np.array(
        [
            staleness(trainer_version=trainer_version, version_min=c.version_min)
            for c in completions
        ],
        dtype=np.float64,
    )
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "frac_reward_zero_std": float(np.mean(credit.constant)),
        "reward/length_penalty": float(credit.penalties.mean()),
        "staleness/mean": float(lags.mean()),
        "staleness/max": float(lags.max()),
        "staleness/p95": float(np.quantile(lags, 0.95)),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(
            np.mean([c.finish_reason is FinishReason.LENGTH for c in completions])
        ),
        "num_groups": float(len(groups)),
        "num_rollouts": float(len(completions)),
        "num_completion_tokens": float(lengths.sum()),
        "scoring_errors": float(sum(bool(group.error) for group in groups)),
        "time/generation": max(c.t_end for c in completions) - min(c.t_start for c in completions),
        "time/reward": float(np.mean([g.t_scored - g.t_generated for g in groups])),
    }
    if credit.divergence is not None:
        metrics["kl"] = float(credit.divergence.sum() / lengths.sum())
        metrics["reward/kl_penalty"] = credit.beta * float(credit.divergence.mean())
    for name in groups[0].rewards:
        values = [v for g in groups for v in g.rewards[name] if v is not None]
        if values:
            metrics[f"rewards/{name}/mean"] = float(np.mean(values))
    return metrics
