"""Advantages: how much better a completion was than its siblings, or than the whole batch.

Everything is float64 and happens before a batch is cut for ranks, on groups that are known by
name, so neither the layout of a batch nor the number of ranks can change a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.types import Array

AdvantageKind = Literal["group_mean", "group_norm", "rloo", "reinforce_pp", "reinforce_pp_baseline"]
GroupKind = Literal["group_mean", "group_norm", "rloo"]

# Rewards are sums of parts, so equal ones may differ by rounding: 0.1 + 0.2 is not 0.3, and
# float32 scores carry a residue of 1e-7. A spread below this share of their size is no signal,
# and dividing by it would blow rounding up to advantages of thousands.
_RELATIVE_TOLERANCE = 1e-6
_ABSOLUTE_TOLERANCE = 1e-12  # for parts that cancel to "zero"


def batch_advantages(groups: Sequence[Sequence[float] | Array], kind: AdvantageKind) -> list[Array]:
    """Advantages float64 of every completion of a batch, by group; a group may be empty.

    The kinds of `group_advantages` look at one group at a time. `reinforce_pp`: reward minus the
    mean of the whole batch, over its standard deviation. `reinforce_pp_baseline`: reward minus the
    mean of the group, over the standard deviation of these differences in the whole batch. Both in
    population form; a batch that is constant up to rounding gives exactly 0. Raises ConfigError
    when a reward is not finite.
    """
    if kind == "reinforce_pp":
        rewards = [_finite(group) for group in groups]
        flat = np.concatenate(rewards)
        if is_constant(flat):
            return [np.zeros_like(values) for values in rewards]
        mean, deviation = flat.mean(), flat.std()
        return [(values - mean) / deviation for values in rewards]
    if kind == "reinforce_pp_baseline":
        centred = [group_advantages(group, "group_mean") for group in groups]
        deviation = np.concatenate(centred).std() if any(c.any() for c in centred) else 1.0
        return [values / deviation for values in centred]
    return [group_advantages(group, kind) for group in groups]


def group_advantages(rewards: Sequence[float] | Array, kind: GroupKind) -> Array:
    """Advantages float64 [R] of the R completions of one prompt.

    `group_mean`: reward minus the mean of the group. `group_norm`: the same over the standard
    deviation of the group (population form). `rloo`: reward minus the mean of the others.
    A constant group, and so every group of one, gives exactly 0. Raises ConfigError when a reward
    is not finite.
    """
    values = _finite(rewards)
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


def _finite(rewards: Sequence[float] | Array) -> Array:
    values: Array = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ConfigError(
            f"a reward must be a finite number, but a group got {values.tolist()}; "
            "mend the reward function (None means: does not apply)"
        )
    return values
