"""Figures of a batch that the controller computes, each by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llamarl_hpc.batching.buffer import ScoredGroup, credit_of
from llamarl_hpc.batching.credit import CreditRules
from llamarl_hpc.config.schema import Config
from llamarl_hpc.controller.step_metrics import batch_metrics
from llamarl_hpc.types import Completion, FinishReason, Prompt, VersionSpan

VERSION = 7  # of the trainer, when the batch is consumed
RULES = CreditRules.of(
    Config.model_validate(
        {"rollout": {"max_completion_length": 10}, "algorithm": {"length_penalty": 1.0}}
    )
)


def completion(length: int, *versions: int, ended: bool = True) -> Completion:
    """One token of each version but the last, which drew the rest; it took `length` seconds."""
    edges = [*range(len(versions)), length]
    return Completion(
        token_ids=np.full(length, 7, dtype=np.int32),
        logprobs=np.full(length, -1.0, dtype=np.float32),
        versions=[VersionSpan(edges[i], edges[i + 1], v) for i, v in enumerate(versions)],
        finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH,
        text="",
        t_start=100.0 + versions[0],
        t_end=100.0 + versions[0] + length,
    )


def scored(completions: list[Completion], reward: list[float], **more: Any) -> ScoredGroup:
    given = {"rewards": {"right": list(reward), "style": [None] * len(reward)}, "error": ""} | more
    return ScoredGroup(
        ticket=0,
        issue=1,
        prompt=Prompt(
            prompt_id="p", epoch=0, text="", token_ids=np.array([1], np.int32), columns={}
        ),
        generator="generator.0",
        completions=completions,
        reward=reward,
        t_issued=0.0,
        t_generated=10.0,
        t_scored=10.0 + completions[0].token_ids.size,
        **given,
    )


def test_figures_of_a_batch_by_hand() -> None:
    groups = [
        scored([completion(2, 7), completion(10, 5, ended=False)], [1.0, 0.0]),
        scored([completion(3, 4, 6), completion(3, 7)], [0.5, 0.5], error="too slow"),
        scored(
            [completion(1, 6), completion(5, 7)],
            [2.0, -1.0],
            rewards={"right": [2.0, None], "style": [None, 0.25]},
        ),
    ]
    found = batch_metrics(groups, trainer_version=VERSION, credit=credit_of(groups, RULES))
    rewards = [1.0, 0.0, 0.5, 0.5, 2.0, -1.0]  # mean 1/2; squares of the distances are 5
    assert found == pytest.approx(
        {
            "reward/mean": sum(rewards) / 6,
            "reward/std": (5 / 6) ** 0.5,
            "rewards/right/mean": (1.0 + 0.0 + 0.5 + 0.5 + 2.0) / 5,  # None counts in none
            "rewards/style/mean": 0.25,
            "frac_reward_zero_std": 1 / 3,
            "reward/length_penalty": (2 + 10 + 3 + 3 + 1 + 5) / 60,
            # 0 2 | 3 0 | 1 0, of the oldest token; sorted 0 0 0 1 2 3, at 0.95 * 5 = 4.75
            "staleness/mean": 1.0,
            "staleness/max": 3.0,
            "staleness/p95": 2.75,
            "completions/mean_length": 4.0,
            "completions/min_length": 1.0,
            "completions/max_length": 10.0,
            "completions/clipped_ratio": 1 / 6,
            "num_groups": 3.0,
            "num_rollouts": 6.0,
            "num_completion_tokens": 24.0,
            "scoring_errors": 1.0,
            "time/generation": 115.0 - 104.0,  # from the first start to the last end
            "time/reward": (2 + 3 + 1) / 3,
        },
        rel=1e-12,
    )
