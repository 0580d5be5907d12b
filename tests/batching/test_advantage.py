"""Advantages: hand-computed values, and the groups that must give exactly nothing."""

from __future__ import annotations

import numpy as np
import pytest

from llamarl_hpc.batching.advantage import batch_advantages, group_advantages, is_constant
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
    assert is_constant(rewards)


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


def test_reinforce_pp_normalises_over_the_batch() -> None:
    # mean 1, squared deviations 1 1 0 4 / 4, so the standard deviation is sqrt(1.5)
    groups = batch_advantages([[0.0, 0.0], [1.0], [3.0]], "reinforce_pp")
    expected = [[-(1.5**-0.5)] * 2, [0.0], [2 * 1.5**-0.5]]
    for actual, values in zip(groups, expected, strict=True):
        np.testing.assert_allclose(actual, values, rtol=1e-15, atol=1e-16)


def test_reinforce_pp_baseline_subtracts_the_group_first() -> None:
    # differences -1 1 and -2 0 2 and exactly 0 0 0; their mean square is 10 / 8
    groups = batch_advantages(
        [[3.0, 5.0], [0.0, 2.0, 4.0], [0.1 + 0.2, 0.3, 0.3]], "reinforce_pp_baseline"
    )
    deviation = (10 / 8) ** 0.5
    np.testing.assert_allclose(groups[0], [-1 / deviation, 1 / deviation], rtol=1e-15)
    np.testing.assert_allclose(groups[1], [-2 / deviation, 0.0, 2 / deviation], rtol=1e-15)
    assert groups[2].tolist() == [0.0] * 3


@pytest.mark.parametrize("kind", ["reinforce_pp", "reinforce_pp_baseline"])
def test_a_batch_that_differs_by_rounding_only_gives_exactly_zero(kind: str) -> None:
    groups = batch_advantages([[0.1 + 0.2, 0.3], [0.3], []], kind)  # type: ignore[arg-type]
    assert [values.tolist() for values in groups] == [[0.0, 0.0], [0.0], []]
    with pytest.raises(ConfigError, match="finite"):
        batch_advantages([[1.0, float("inf")]], kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["group_mean", "group_norm", "rloo"])
def test_groups_know_nothing_of_one_another(kind: str) -> None:
    groups = [[1.0, 2.0, 6.0], [0.0, 0.5], [7.0]]
    together = batch_advantages(groups, kind)  # type: ignore[arg-type]
    for values, rewards in zip(together, groups, strict=True):
        assert values.tolist() == group_advantages(rewards, kind).tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["reinforce_pp", "reinforce_pp_baseline"])
def test_the_order_of_groups_in_a_batch_changes_nothing(kind: str) -> None:
    groups = [[1.0, 2.0, 6.0], [0.0, 0.5], [7.0, -3.0, 0.1]]
    straight = batch_advantages(groups, kind)  # type: ignore[arg-type]
    turned = batch_advantages(groups[::-1], kind)[::-1]  # type: ignore[arg-type]
    for a, b in zip(straight, turned, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-14)
