"""Which rows count after a resume."""

from __future__ import annotations

from typing import Any

import numpy as np

from analysis.current_groups import current_groups
from analysis.lineage import Attempt, current_events, current_metrics, first_lost_step

TRAINED, DROPPED, ABANDONED, EVALUATION = range(4)


def attempts(*resumed: int | None) -> list[Attempt]:
    return [Attempt(number=i + 1, resumed_from_step=step) for i, step in enumerate(resumed)]


def rows(*values: tuple[int, int, int, int], purpose: int = 0) -> dict[str, Any]:
    """(group_id, attempt, status, step) in the order in which they were written."""
    columns = np.array(values, dtype=np.int64).reshape(-1, 4).T
    return {
        "group_id": columns[0],
        "attempt": columns[1],
        "status": columns[2],
        "step": columns[3],
        "purpose": np.full(len(values), purpose),
        "issue": np.ones(len(values), dtype=np.int64),
        "t_resolved": np.arange(len(values), dtype=np.float64),
    }


def test_a_step_is_lost_when_any_later_attempt_resumed_below_it() -> None:
    lost = first_lost_step(attempts(0, 20, 10, None))
    assert lost[1] == 10 and lost[2] == 10
    assert lost[3] == lost[4] == np.iinfo(np.int64).max


def test_what_was_trained_again_is_seen_once() -> None:
    groups = rows(
        (0, 1, TRAINED, 0),
        (1, 1, TRAINED, 1),
        (2, 1, TRAINED, 2),  # after the checkpoint of step 2: thrown away
        (2, 2, TRAINED, 2),
        (3, 2, TRAINED, 3),
    )
    assert current_groups(groups, attempts(0, 2)).tolist() == [True, True, False, True, True]


def test_what_was_thrown_away_and_not_yet_trained_again_is_not_seen() -> None:
    groups = rows((0, 1, TRAINED, 0), (1, 1, TRAINED, 1))
    assert current_groups(groups, attempts(0, 1)).tolist() == [True, False]


def test_a_group_that_was_abandoned_and_issued_again_has_its_last_fate() -> None:
    groups = rows(
        (0, 1, ABANDONED, -1), (0, 2, TRAINED, 0), (1, 1, DROPPED, -1), (1, 1, ABANDONED, -1)
    )
    assert current_groups(groups, attempts(0, 0)).tolist() == [False, True, False, True]


def test_a_trained_row_wins_over_a_later_abandoned_one() -> None:
    groups = rows((0, 1, TRAINED, 0), (0, 1, ABANDONED, -1))
    assert current_groups(groups, attempts(0)).tolist() == [True, False]


def test_trained_twice_in_one_lineage_stays_visible() -> None:
    groups = rows((0, 1, TRAINED, 0), (0, 2, TRAINED, 5))
    assert current_groups(groups, attempts(0, 3)).tolist() == [True, True]


def test_an_evaluation_counts_up_to_the_version_that_was_resumed() -> None:
    groups = rows(
        (0, 1, EVALUATION, 0),
        (1, 1, EVALUATION, 10),
        (2, 1, EVALUATION, 20),
        (1, 2, EVALUATION, 10),
        purpose=1,
    )
    assert current_groups(groups, attempts(0, 10)).tolist() == [True, False, False, True]


def test_no_groups_is_fine() -> None:
    assert current_groups(rows(), attempts(0)).tolist() == []


def test_without_a_run_json_the_last_row_of_a_group_counts() -> None:
    groups = rows((0, 1, TRAINED, 0), (1, 1, DROPPED, -1), (1, 1, TRAINED, 1))
    assert current_groups(groups, []).tolist() == [True, False, True]


def test_metrics_are_one_line_per_step_and_evaluations_one_per_version() -> None:
    lines: list[dict[str, Any]] = [
        {"event": "eval", "policy_version": 0, "attempt": 1, "x": "a"},
        {"step": 0, "attempt": 1, "x": "a"},
        {"step": 1, "attempt": 1, "x": "lost"},
        {"event": "eval", "policy_version": 2, "attempt": 1, "x": "lost"},
        {"step": 3, "attempt": 1, "x": "lost, never made again"},
        {"step": 1, "attempt": 2, "x": "b"},
        {"event": "eval", "policy_version": 2, "attempt": 2, "x": "b"},
    ]
    steps = current_metrics(lines, attempts(0, 1))
    assert [(row["step"], row["x"]) for row in steps] == [(0, "a"), (1, "b")]
    evaluations = current_events(lines, attempts(0, 1), "eval")
    assert [(row["policy_version"], row["x"]) for row in evaluations] == [(0, "a"), (2, "b")]


def test_an_attempt_that_does_not_know_its_step_yet_throws_nothing_away() -> None:
    entry = {"number": 2, "resumed_from_step": None, "outcome": "running", "pid": 7}
    attempt = Attempt.from_info(entry)
    assert attempt.resumed_from_step is None and attempt.ended is None
    groups = rows((0, 1, TRAINED, 0), (1, 1, TRAINED, 1))
    assert current_groups(groups, [*attempts(0), attempt]).tolist() == [True, True]
