"""Advantages of one prompt group: how much better a completion was than its siblings.

Everything is float64 and works on the rewards of exactly one group, so neither the layout of a
batch nor the number of ranks can change a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.types import Array

AdvantageKind = Literal["group_mean", "group_norm", "rloo"]

# Rewards are sums of parts, so equal ones may differ by rounding: 0.1 + 0.2 is not 0.3, and
# float32 scores carry a residue of 1e-7. A spread below this share of their size is no signal,
# and dividing by it would blow rounding up to advantages of thousands.
_RELATIVE_TOLERANCE = 1e-6
_ABSOLUTE_TOLERANCE = 1e-12  # for parts that cancel to "zero"


def group_advantages(rewards: Sequence[float], kind: AdvantageKind) -> Array:
    """Advantages float64 [R] of the R completions of one prompt.

    `group_mean`: reward minus the mean of the group. `group_norm`: the same over the standard
    deviation of the group (population form). `rloo`: reward minus the mean of the others.
    A constant group, and so every group of one, gives exactly 0. Raises ConfigError when a reward
    is not finite.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ConfigError(
            f"a reward must be a finite number, but a group got {values.tolist()}; "
            "mend the reward function (None means: does not apply)"
        )
    if is_constant(values):
        return np.zeros_like(values)
    centred: Array = values - values.mean()
    if kind == "group_norm":
        centred /= values.std()
    elif kind == "rloo":  # r_i - mean of the others = (r_i - mean) * R / (R - 1)
        centred *= values.size / (values.size - 1)
    return centred


def is_constant(rewards: Sequence[float] | Array) -> bool:
    """Whether all rewards of a group are equal up to rounding; such a group teaches nothing."""
    values = np.asarray(rewards, dtype=np.float64)
    if values.size < 2:
        return True
    tolerance = _RELATIVE_TOLERANCE * float(np.abs(values).max()) + _ABSOLUTE_TOLERANCE
    return bool(np.ptp(values) <= tolerance)


def fraction_constant(groups: Iterable[Sequence[float]]) -> float:
    """Share of groups without any spread of reward (`frac_reward_zero_std`); 0.0 of no groups."""
    flags = [is_constant(rewards) for rewards in groups]
    return sum(flags) / len(flags) if flags else 0.0
