"""Overlap and idle shares, and confidence intervals: numbers by hand."""

from __future__ import annotations

import pytest

from analysis.statistics import difference_interval, wilson_interval
from analysis.timeline import (
    Overlap,
    executors,
    idle_shares,
    intersection,
    seconds,
    step_times,
    union,
    within,
)
from llamarl_hpc.observability.trace import Span


def span(name: str, executor: str, start: float, end: float) -> Span:
    return Span(name=name, executor=executor, start=start, end=end)


def test_intervals() -> None:
    assert union([(3, 4), (0, 1), (0.5, 2), (5, 5)]) == [(0, 2), (3, 4)]
    assert intersection([(0, 2), (3, 6)], [(1, 4), (5, 9)]) == [(1, 2), (3, 4), (5, 6)]
    assert within([(0, 2), (3, 4), (5, 9)], 1, 6) == [(1, 2), (3, 4), (5, 6)]
    assert within([(0, 2)], 2, 5) == []
    assert seconds([(1, 2), (5, 6.5)]) == 2.5


def test_step_times_are_taken_between_the_ends_of_training() -> None:
    spans = [
        span("train", "trainer", 0, 4),
        span("publish_weights", "trainer", 4, 4.5),
        span("generate", "generator.0", 4, 9),
        span("generate", "generator.1", 4, 7),
        span("wait", "generator.1", 7, 10),
        span("score", "reward", 8, 8.5),
        span("train", "trainer", 6, 10),
    ]
    (times,) = step_times(spans)
    assert times == (6.0, (5 + 3) / 2, 4.5, 0.5, 3.5)


def test_steps_with_an_evaluation_or_a_checkpoint_are_left_out() -> None:
    trained = [span("train", "trainer", 10 * i, 10 * i + 5) for i in range(5)]
    assert len(step_times(trained)) == 4
    assert len(step_times(trained, [(16, 17)])) == 3
    assert len(step_times([*trained, span("checkpoint", "trainer", 26, 27)])) == 3


def test_the_bound_and_how_much_of_it_was_reached() -> None:
    overlap = Overlap(num_steps=3, step_s=8.0, t_gen=6.0, t_train=4.0, t_score=0.0, both_s=2.0)
    assert overlap.bound == pytest.approx(10 / 6)
    assert overlap.speed_up == pytest.approx(10 / 8)
    assert overlap.share_of_bound == pytest.approx(6 / 8)


def test_idle_shares_count_from_the_first_training_to_the_last() -> None:
    spans = [
        span("generate", "generator.10", 0, 5),
        span("generate", "generator.2", 8, 12),
        span("train", "trainer", 4, 6),
        span("train", "trainer", 10, 14),
        span("step", "controller", 0, 14),
    ]
    assert executors(spans) == ["generator.2", "generator.10", "trainer"]
    assert idle_shares(spans) == pytest.approx(
        {"generator.2": 0.6, "generator.10": 0.9, "trainer": 0.4}
    )
    assert idle_shares([]) == {}


def test_wilson_interval_against_published_values() -> None:
    # 81 of 263: 0.2553 to 0.3662 (Newcombe 1998, table I, method 3)
    low, high = wilson_interval(81, 263)
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)
    assert wilson_interval(0, 20)[0] == 0.0
    assert round(wilson_interval(0, 20)[1], 4) == 0.1611
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_difference_interval_against_published_values() -> None:
    # 56/70 against 48/80: 0.0524 to 0.3339 (Newcombe 1998, table II (a), method 10)
    low, high = difference_interval((48, 80), (56, 70))
    assert (round(low, 4), round(high, 4)) == (0.0524, 0.3339)
