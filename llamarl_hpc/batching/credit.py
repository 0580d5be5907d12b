"""From scores to what the loss multiplies with: penalties for length and for the distance from the
reference, truncated completions, advantages.

Pure numbers of one batch, in float64. The rewards themselves are not changed: what is stored and
logged is what the reward functions said. Letters: R rollouts of all groups, in the batch's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from llamarl_hpc.batching.advantage import AdvantageKind, batch_advantages, is_constant
from llamarl_hpc.config.losses import KlEstimator
from llamarl_hpc.config.schema import Config
from llamarl_hpc.types import Array

LOG_RATIO_BOUND = 20.0  # as in the loss


@dataclass(frozen=True, kw_only=True, slots=True)
class CreditRules:
    """How credit is given; the keys of the same names in block `algorithm`."""

    advantage: AdvantageKind
    truncated_completions: Literal["keep", "mask", "drop"]
    length_penalty: float
    overlong_penalty: float
    overlong_buffer: int
    max_completion_length: int
    beta: float  # of a KL term in the reward; 0: none
    kl_estimator: KlEstimator

    @classmethod
    def of(cls, config: Config) -> CreditRules:
        algorithm = config.algorithm
        return cls(
            advantage=algorithm.advantage,
            truncated_completions=algorithm.truncated_completions,
            length_penalty=algorithm.length_penalty,
            overlong_penalty=algorithm.overlong_penalty,
            overlong_buffer=algorithm.overlong_buffer,
            max_completion_length=config.rollout.max_completion_length,
            beta=algorithm.beta if algorithm.kl_in == "reward" else 0.0,
            kl_estimator=algorithm.kl_estimator,
        )

    def penalties(self, lengths: Sequence[int]) -> Array:
        """What is taken off the rewards of completions of these lengths, float64.

        `length_penalty` grows from 0 to its value at the length limit, `overlong_penalty` does so
        over the last `overlong_buffer` tokens before it.
        """
        tokens = np.asarray(lengths, dtype=np.float64)
        penalty: Array = self.length_penalty * tokens / self.max_completion_length
        if self.overlong_buffer > 0:
            excess = tokens - (self.max_completion_length - self.overlong_buffer)
            penalty += self.overlong_penalty * np.clip(excess / self.overlong_buffer, 0.0, 1.0)
        return penalty


@dataclass(frozen=True, kw_only=True, slots=True)
class Credit:
    """Of one batch."""

    advantages: Array  # float64 [R]; 0 where a rollout counts in nothing
    trained: Array  # bool [R], False where the loss must not see a token
    penalties: Array  # float64 [R], taken off the reward for the length
    # of each group: no spread among the rollouts that count (reinforce_pp: those of the batch), but
    # for the KL
    constant: list[bool]
    divergence: Array | None = None  # float64 [R], sums of the KL estimate, if it is in the reward
    beta: float = 0.0  # of the KL term in the reward


def assign_credit(
    rewards: Sequence[Sequence[float]],
    lengths: Sequence[Sequence[int]],
    truncated: Sequence[Sequence[bool]],
    rules: CreditRules,
    divergences: Sequence[Sequence[float]] | None = None,
    failed: Sequence[bool] | None = None,
) -> Credit:
    """Credit of every rollout, from the reward, length and truncation of each, by group.

    `keep` treats a truncated completion like any other. `mask` keeps it in the baseline, but its
    tokens are not trained. With `drop` it counts in neither. Raises ConfigError when a reward is
    not finite. `divergences`: of each rollout, if the KL term is in the reward. `failed`: of each
    group, whether its scoring failed; its rewards mean nothing, so it counts in neither.
    """
    drops, keeps = (rules.truncated_completions == option for option in ("drop", "keep"))
    penalties = [rules.penalties(group) for group in lengths]
    broken = failed or [False] * len(rewards)
    counts = [
        ~(np.asarray(group, dtype=bool) & drops) & (not is_broken)
        for group, is_broken in zip(truncated, broken, strict=True)
    ]
    credited = [
        (np.asarray(values, dtype=np.float64) - penalty)[counted]
        for values, penalty, counted in zip(rewards, penalties, counts, strict=True)
    ]
    constant = [is_constant(values) for values in credited]
    if rules.advantage == "reinforce_pp":  # it compares within the batch, not within groups
        constant = [is_constant(np.concatenate(credited))] * len(credited)
    if divergences is not None:
        credited = [
            values - rules.beta * np.asarray(group, dtype=np.float64)[counted]
            for values, group, counted in zip(credited, divergences, counts, strict=True)
        ]
    advantages = []
    for counted, values in zip(counts, batch_advantages(credited, rules.advantage), strict=True):
        whole = np.zeros(counted.size, dtype=np.float64)
        whole[counted] = values
        advantages.append(whole)
    return Credit(
        advantages=np.concatenate(advantages),
        trained=np.array(
            [
                not is_broken and (keeps or not cut)
                for group, is_broken in zip(truncated, broken, strict=True)
                for cut in group
            ]
        ),
        penalties=np.concatenate(penalties),
        constant=constant,
        divergence=None if divergences is None else np.concatenate(divergences),
        beta=rules.beta,
    )


def divergence(behaviour: Array, reference: Array, estimator: KlEstimator) -> float:
    """Sum over the tokens of a completion of the estimate of KL(mu, reference), from the log-probs
    [T] of both; mu drew the tokens. The estimates are those of `training.loss.kl_estimate`."""
    log_ratio: Array = behaviour.astype(np.float64) - reference.astype(np.float64)
    if estimator == "k1":
        return float(log_ratio.sum())
    if estimator == "k2":
        return float(0.5 * np.square(log_ratio).sum())
    opposite = np.minimum(-log_ratio, LOG_RATIO_BOUND)
    return float((np.expm1(opposite) - opposite).sum())
