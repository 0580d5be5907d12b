"""Every loss and option of a loss, as blocks `algorithm` of a config."""

from __future__ import annotations

from typing import Any

from llamarl_hpc.config.losses import PRESETS

ALGORITHMS: list[dict[str, Any]] = [
    *({"loss_type": kind} for kind in PRESETS),
    {"loss_type": "aipo", "importance_sampling_level": "sequence", "rho": 1.1},
    {"loss_type": "ppo", "loss_aggregation": "seq-mean-token-sum-norm", "delta": 1.5},
    {"loss_type": "gspo", "epsilon": 0.2, "epsilon_high": 0.3, "loss_aggregation": "token-mean"},
    {"loss_type": "dapo", "mismatch_correction": "truncate", "mismatch_level": "sequence"},
    {"loss_type": "aipo", "mismatch_correction": "mask", "mismatch_max": 1.2},
    {"mismatch_correction": "mask", "mismatch_level": "sequence", "mismatch_min": 0.8},
    {"loss_type": "grpo", "entropy_coef": 0.3},
    {"loss_type": "aipo", "beta": 0.1, "kl_estimator": "k2"},
    {"loss_type": "dr_grpo", "beta": 0.2},
]


def name_of(algorithm: dict[str, Any]) -> str:
    return "-".join(map(str, algorithm.values()))
