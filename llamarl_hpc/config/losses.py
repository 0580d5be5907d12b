"""What each `algorithm.loss_type` stands for: one row of a table, completed by keys.

Most losses of the field are the same few ideas put together in different ways, so a name is a
preset: how the importance ratio enters, at which level, between which bounds, and how tokens are
averaged. The formulas are in docs/algorithms.md, their code in `training/loss.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from llamarl_hpc.config.schema import AlgorithmConfig

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Level = Literal["token", "sequence"]
MismatchCorrection = Literal["none", "truncate", "mask"]
KlEstimator = Literal["k1", "k2", "k3"]

# r is the ratio, w the same within its bounds, A the advantage:
#   score            -A * logp                  no ratio
#   detached_weight  -w * A * logp              w is not differentiated
#   clamped_ratio    -w * A                     w is: no gradient beyond the bounds
#   clipped_ratio    -min(r * A, w * A)         the pessimistic one of both
Surrogate = Literal["score", "detached_weight", "clamped_ratio", "clipped_ratio"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A row of the table: what a loss_type means where a key of its own is not set."""

    surrogate: Surrogate
    bounded_by: Literal["", "rho", "epsilon"]  # the keys that bound the ratio; empty: none
    level: Level = "token"
    aggregation: Aggregation = "token-mean"
    epsilon: float = 0.2  # the lower bound is 1 - epsilon
    epsilon_high: float | None = None  # the upper one is 1 + epsilon_high; None: as epsilon
    is_decoupled: bool = False  # r is pi / proximal, and proximal / mu a weight bounded by rho


PRESETS = {
    "aipo": Preset(surrogate="detached_weight", bounded_by="rho"),
    "aipo_clamp": Preset(surrogate="clamped_ratio", bounded_by="rho"),
    "reinforce": Preset(surrogate="score", bounded_by=""),
    "ppo": Preset(surrogate="clipped_ratio", bounded_by="epsilon"),
    "grpo": Preset(
        surrogate="clipped_ratio", bounded_by="epsilon", aggregation="seq-mean-token-mean"
    ),
    "dr_grpo": Preset(
        surrogate="clipped_ratio", bounded_by="epsilon", aggregation="seq-mean-token-sum-norm"
    ),
    "dapo": Preset(surrogate="clipped_ratio", bounded_by="epsilon", epsilon_high=0.28),
    "decoupled_ppo": Preset(surrogate="clipped_ratio", bounded_by="epsilon", is_decoupled=True),
    # no lower bound, and an upper one of 5
    "cispo": Preset(
        surrogate="detached_weight", bounded_by="epsilon", epsilon=1.0, epsilon_high=4.0
    ),
    "gspo": Preset(
        surrogate="clipped_ratio",
        bounded_by="epsilon",
        level="sequence",
        aggregation="seq-mean-token-mean",
        epsilon=3.0e-4,
        epsilon_high=4.0e-4,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSettings:
    """A loss with nothing left open."""

    surrogate: Surrogate
    level: Level  # of the ratio: each token's, or the geometric mean over its rollout
    low: float  # bounds of the ratio; 0 and inf where there are none
    high: float
    delta: float  # bound of the ratio where the advantage is negative (clipped_ratio); or inf
    is_decoupled: bool
    behaviour_max: float  # bound of proximal / mu
    aggregation: Aggregation
    mismatch_correction: MismatchCorrection
    mismatch_level: Level
    mismatch_min: float
    mismatch_max: float
    entropy_coef: float
    beta: float  # of the KL term in the loss; 0 where there is none, or where it is in the reward
    kl_estimator: KlEstimator

    @property
    def pulls_everywhere(self) -> bool:
        """Whether tokens without advantage have a gradient, too."""
        return self.entropy_coef > 0.0 or self.beta > 0.0

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> LossSettings:
        """The preset of `algorithm.loss_type` with the user's keys in the places they name."""
        preset = PRESETS[algorithm.loss_type]
        low, high = _bounds(algorithm, preset)
        return cls(
            surrogate=preset.surrogate,
            level=algorithm.importance_sampling_level or preset.level,
            low=low,
            high=high,
            delta=math.inf if algorithm.delta is None else algorithm.delta,
            is_decoupled=preset.is_decoupled,
            behaviour_max=algorithm.rho,
            aggregation=algorithm.loss_aggregation or preset.aggregation,
            mismatch_correction=algorithm.mismatch_correction,
            mismatch_level=algorithm.mismatch_level,
            mismatch_min=algorithm.mismatch_min,
            mismatch_max=algorithm.mismatch_max,
            entropy_coef=algorithm.entropy_coef,
            beta=algorithm.beta if algorithm.kl_in == "loss" else 0.0,
            kl_estimator=algorithm.kl_estimator,
        )


def _bounds(algorithm: AlgorithmConfig, preset: Preset) -> tuple[float, float]:
    if preset.bounded_by == "":
        return 0.0, math.inf
    if preset.bounded_by == "rho":
        return 0.0, algorithm.rho
    low = preset.epsilon if algorithm.epsilon is None else algorithm.epsilon
    high = preset.epsilon_high if algorithm.epsilon_high is None else algorithm.epsilon_high
    return 1.0 - low, 1.0 + (low if high is None else high)
