"""Who waits for whom, on spans drawn by hand."""

from __future__ import annotations

import pytest

from analysis.waiting import gaps, wait_seconds, waits
from llamarl_hpc.observability.trace import Span


def span(executor: str, name: str, start: float, end: float) -> Span:
    return Span(name=name, start=start, end=end, executor=executor)


#  second       0    1    2    3    4    5    6    7    8    9
#  generator.0  |generate      |                   |generate|
#  generator.1  |generate           |              |gen|
#  reward                      |score|
#  trainer           |train|         |train        |         |train
SPANS = [
    span("generator.0", "generate", 0, 3),
    span("generator.1", "generate", 0, 4),
    span("reward", "score", 3, 4.5),
    span("trainer", "wait", 0, 1),
    span("trainer", "train", 1, 2),
    span("trainer", "train", 5, 7),
    span("generator.0", "generate", 7, 9),
    span("generator.1", "generate", 7, 8),
    span("trainer", "train", 9, 10),
]


def test_idle_time_is_put_down_to_those_who_worked_meanwhile() -> None:
    found = waits(SPANS, 0.0, 10.0)
    assert found["trainer"] == {
        "generator": [(0.0, 1.0), (2.0, 4.0), (7.0, 9.0)],
        "reward": [(4.0, 4.5)],
        "controller": [(4.5, 5.0)],
    }
    assert found["generator.0"] == {
        "trainer": [(5.0, 7.0), (9.0, 10.0)],
        "reward": [(3.0, 4.5)],
        "controller": [(4.5, 5.0)],
    }
    assert found["generator.1"]["generator"] == [(8.0, 9.0)]  # the slower replica
    assert found["reward"]["generator"] == [(0.0, 3.0), (7.0, 9.0)]


def test_busy_and_waits_fill_the_time() -> None:
    seconds = wait_seconds(SPANS)
    working = {"trainer": 4.0, "generator.0": 4.0, "generator.1": 4.0, "reward": 1.5}
    for executor, parts in seconds.items():  # from 1 to 10
        assert sum(parts.values()) == pytest.approx(9.0 - working[executor]), executor
    assert wait_seconds([span("reward", "score", 0, 1)]) == {}


def test_gaps_are_what_is_left() -> None:
    assert gaps([(1, 2), (3, 4)], 0, 5) == [(0, 1), (2, 3), (4, 5)]
    assert gaps([(0, 5)], 0, 5) == [] and gaps([], 1, 2) == [(1, 2)]
