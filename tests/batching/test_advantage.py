"""Advantages: hand-computed values, and the groups that must give exactly nothing."""

from __future__ import annotations

import numpy as np
import pytest

from llamarl_hpc.batching.advantage import fraction_constant, group_advantages, is_constant
from llamarl_hpc.errors import ConfigError


def test_group_mean_is_reward_minus_mean_of_the_group() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 0.0], "group_mean").tolist() == [
        0.75,
        -0.25,
        -0.25,
        -0.25,
    ]


def test_group_norm_divides_by_the_population_standard_deviation() -> None:
    # mean 1/4, variance 3/16, so 0.75 / (sqrt(3)/4) = sqrt(3)
    advantages = group_advantages([1.0, 0.0, 0.0, 0.0], "group_norm")
    np.testing.assert_allclose(advantages, [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)], rtol=1e-15)


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    advantages = group_advantages([1.0, 2.0, 6.0], "rloo")
    np.testing.assert_allclose(advantages, [1.0 - 4.0, 2.0 - 3.5, 6.0 - 1.5], rtol=1e-15)


@pytest.mark.parametrize("kind", ["group_mean", "group_norm", "rloo"])
@pytest.mark.parametrize(
    "rewards",
    [
        [0.1 + 0.2] * 7 + [0.3],
        [float(np.float32(0.7))] * 7 + [float(np.float32(0.70000005))],
        [0.1 + 0.2 - 0.3, 0.0, 0.0],
        [-5e6] * 3,
        [0.0] * 4,
        [3.0],
    ],
)
def test_groups_that_differ_by_rounding_only_give_exactly_zero(
    kind: str, rewards: list[float]
) -> None:
    advantages = group_advantages(rewards, kind)  # type: ignore[arg-type]
    assert advantages.dtype == np.float64
    assert advantages.tolist() == [0.0] * len(rewards)
    assert fraction_constant([rewards, [0.0, 1.0]]) == 0.5


def test_small_but_real_differences_count() -> None:
    assert not is_constant([1.0, 1.001])
    assert not is_constant([1e-6, 2e-6])


def test_advantages_follow_their_rewards_through_a_permutation() -> None:
    rewards = np.array([0.3, 1.7, -0.4, 0.9, 0.0])
    order = np.array([3, 0, 4, 1, 2])
    for kind in ("group_mean", "group_norm", "rloo"):
        expected = group_advantages(rewards.tolist(), kind)[order]
        np.testing.assert_allclose(
            group_advantages(rewards[order].tolist(), kind), expected, rtol=1e-14
        )


def test_a_reward_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="finite"):
        group_advantages([1.0, float("nan")], "group_mean")


def test_no_groups_have_no_constant_share() -> None:
    assert fraction_constant([]) == 0.0
