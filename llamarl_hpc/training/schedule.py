"""The learning rate as a pure function of how many optimizer steps were really applied."""

from __future__ import annotations

import math

from llamarl_hpc.config.schema import TrainerConfig


def learning_rate(config: TrainerConfig, policy_version: int) -> float:
    """Rate of the step that makes version `policy_version + 1`.

    Rises linearly over `warmup_steps` (the first step already moves), then stays, or falls to 0
    at `max_steps`.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if policy_version < warmup:
        return peak * (policy_version + 1) / warmup
    if config.lr_scheduler_type == "constant":
        return peak
    done = min(1.0, (policy_version - warmup) / max(1, config.max_steps - warmup))
    if config.lr_scheduler_type == "linear":
        return peak * (1.0 - done)
    return peak * 0.5 * (1.0 + math.cos(math.pi * done))
