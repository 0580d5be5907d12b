"""Alarms: which metrics begin one, when, and what it says."""

from __future__ import annotations

import math
from typing import Any

import pytest

from llamarl_hpc.config.schema import AlarmsConfig
from llamarl_hpc.observability.alarms import Alarm, Alarms

GOOD = {
    "loss": 0.1,
    "grad_norm": 1.0,
    "steps_refused": 0.0,
    "frac_reward_zero_std": 0.5,
    "ess": 0.9,
    "mismatch/kl": 0.01,
    "entropy": 2.0,
    "reward/mean": 1.0,
    "completions/mean_length": 100.0,
    "tokens/trained": 50.0,
}


def begun(steps: list[dict[str, float]], **config: Any) -> list[tuple[int, Alarm]]:
    """(step, alarm) of everything that begins in a run with these metrics."""
    alarms = Alarms(AlarmsConfig.model_validate(config))
    return [(k, a) for k, changes in enumerate(steps) for a in alarms.check(GOOD | changes)]


def test_a_good_run_is_quiet_with_the_defaults() -> None:
    assert begun([{}] * 50) == []


@pytest.mark.parametrize(
    "changes",
    [{"loss": math.nan}, {"loss": math.inf}, {"grad_norm": math.nan}, {"steps_refused": 1.0}],
)
def test_what_is_not_finite_stops_at_once(changes: dict[str, float]) -> None:
    ((step, alarm),) = begun([{}, changes, {}])
    assert (step, alarm.name, alarm.stops) == (1, "not_finite", True)
    assert "is not a finite number" in alarm.sentence
    assert not begun([changes], not_finite="warn")[0][1].stops
    assert begun([changes], not_finite="off") == []


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("ess", {"ess": 0.01}, "ess 0.01 was below alarms.ess.limit 0.05 for 3 steps"),
        (
            "mismatch_kl",
            {"mismatch/kl": 0.7},
            "mismatch/kl 0.7 was above alarms.mismatch_kl.limit 0.5 for 3 steps",
        ),
        (
            "entropy",
            {"entropy": 0.001},
            "entropy 0.001 was below alarms.entropy.limit 0.01 for 3 steps",
        ),
        ("no_signal", {"frac_reward_zero_std": 1.0}, "no group had different rewards for 3 steps"),
    ],
)
def test_an_alarm_begins_after_its_steps_in_a_row_and_is_told_once(
    name: str, changes: dict[str, float], sentence: str
) -> None:
    steps = [changes, changes, {}, changes, changes, changes, changes, {}, *[changes] * 3]
    found = begun(steps, **{name: {"steps": 3, "action": "stop"}})
    assert [(step, alarm.name, alarm.stops) for step, alarm in found] == [
        (5, name, True),
        (10, name, True),
    ]
    assert found[0][1].sentence == sentence


def test_figures_of_no_token_are_no_reason_for_an_alarm() -> None:
    nothing = {"ess": 0.0, "entropy": 0.0, "tokens/trained": 0.0}
    assert begun([nothing] * 20) == []


def test_a_fall_of_the_reward_is_measured_from_its_best_mean() -> None:
    rewards = [1.0, 2.0, 3.0, 2.0, 2.0, 1.0, 0.0, 0.0]
    found = begun(
        [{"reward/mean": reward} for reward in rewards],
        reward={"limit": 1.2, "steps": 2, "action": "warn"},
    )
    # means 1.5 2.5 2.5 2.0 1.5 0.5 0.0
    assert [(step, alarm.value) for step, alarm in found] == [(6, 0.5)]
    assert "averaged 0.5 over 2 steps" in found[0][1].sentence
    assert "below the 2.5 that it was" in found[0][1].sentence


@pytest.mark.parametrize("last", [250.0, 20.0])
def test_lengths_may_not_leave_the_range_around_the_first_ones(last: float) -> None:
    lengths = [100.0, 100.0, 150.0, 70.0, last, last]
    found = begun(
        [{"completions/mean_length": length} for length in lengths],
        length={"limit": 2.0, "steps": 2, "action": "warn"},
    )
    assert [step for step, _ in found] == [4 if last < 100 else 5]
    assert "beyond 2 times (alarms.length.limit) the 100" in found[0][1].sentence


def test_a_streak_that_may_stop_the_run_is_suspicious_from_its_first_step() -> None:
    alarms = Alarms(AlarmsConfig.model_validate({"ess": {"steps": 3, "action": "stop"}}))
    looks = []
    for ess in (0.9, 0.01, 0.01, 0.9):
        alarms.check(GOOD | {"ess": ess})
        looks.append(alarms.is_suspicious)
    assert looks == [False, True, True, False]


def test_alarms_that_stop_come_first() -> None:
    both = {"loss": math.nan, "frac_reward_zero_std": 1.0}
    found = begun([both], no_signal={"steps": 1}, not_finite="stop")
    assert [alarm.name for _, alarm in found] == ["not_finite", "no_signal"]
