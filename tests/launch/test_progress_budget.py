"""Attempts that come to no newer checkpoint are counted, and end a crash loop with reasons."""

from __future__ import annotations

from typing import Any

import pytest

from llamarl_hpc.errors import NoProgress
from llamarl_hpc.launch.progress_budget import check_budget, without_progress


def attempts(*begun: int | None, by: str = "requeue") -> list[dict[str, Any]]:
    """Attempts that began at these steps; a person started the first."""
    return [
        {
            "number": n,
            "resumed_from_step": step,
            "started_by": by if n > 1 else "",
            "outcome": "failed",
            "reason": f"why {n}\nand its log",
        }
        for n, step in enumerate(begun, start=1)
    ]


def numbers(entries: list[dict[str, Any]], newest_step: int) -> list[int]:
    return [attempt["number"] for attempt in without_progress(entries, newest_step)]


def test_progress_is_a_newer_checkpoint() -> None:
    assert numbers(attempts(0, 10, 20), newest_step=30) == []
    assert numbers(attempts(0, 10, 20), newest_step=20) == [3]
    assert numbers(attempts(0, 10, 10, 10), newest_step=10) == [2, 3, 4]
    assert numbers(attempts(0), newest_step=0) == [1]


def test_an_attempt_that_did_not_come_to_read_its_checkpoint_made_none() -> None:
    assert numbers(attempts(0, 10, None, None), newest_step=10) == [2, 3, 4]


def test_a_person_who_starts_an_attempt_opens_the_account_anew() -> None:
    entries = attempts(10, 10, 10)
    entries[1]["started_by"] = ""
    assert numbers(entries, newest_step=10) == [2, 3]


def test_a_spent_budget_is_a_sentence_with_the_reasons() -> None:
    entries = attempts(0, 10, None, 10)
    entries[3] |= {"outcome": "running", "reason": ""}  # killed
    check_budget(entries, 10, limit=4)
    with pytest.raises(NoProgress) as caught:
        check_budget(entries, 10, limit=3)
    assert caught.value.exit_code == 3
    assert str(caught.value) == (
        "3 attempts in a row made no progress beyond step 10 "
        "(launch.max_attempts_without_progress), so the run is not continued: attempt 2: why 2; "
        "attempt 3: why 3; attempt 4: ended without a word"
    )
