"""Every reference answer of the well-known data sets scores 1.0 against itself, and no other does.

Set LLAMARL_TEST_DATA to a folder that holds gsm8k/, math/, svamp/ and mawps/ as JSONL.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from llamarl_hpc.rewards.equality import normalise
from llamarl_hpc.rewards.math_answer import reference_answer, score
from llamarl_hpc.rewards.numbers import read_number

FOLDER = Path(os.environ.get("LLAMARL_TEST_DATA", "/nonexistent"))

pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="LLAMARL_TEST_DATA names no folder with gsm8k/, math/, ..."
)

FILES = [
    ("gsm8k/train.jsonl", "answer"),
    ("gsm8k/test.jsonl", "answer"),
    ("math/math500_test.jsonl", "answer"),
    ("svamp/test.jsonl", "Answer"),
    ("mawps/singleop.jsonl", "target"),
    ("mawps/addsub.jsonl", "target"),
    ("mawps/singleeq.jsonl", "target"),
    ("mawps/multiarith.jsonl", "target"),
]


def rows(name: str) -> list[dict[str, Any]]:
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


@pytest.mark.parametrize(("name", "column"), FILES)
def test_gold_scores_one_against_itself(name: str, column: str) -> None:
    wrong = []
    for row in rows(name):
        raw = str(row[column])
        gold = reference_answer(raw)
        forms = (raw, rf"Therefore \boxed{{{gold}}}.", f"So:\n#### {gold}")
        wrong += [(gold, form) for form in forms if score(raw, form) != 1.0]
    assert wrong == []


@pytest.mark.parametrize(("name", "column"), FILES)
def test_gold_scores_nothing_against_the_next_rows_answer(name: str, column: str) -> None:
    golds = [reference_answer(str(row[column])) for row in rows(name)]
    wrong = []
    for gold, other in itertools.pairwise(golds):
        a, b = normalise(gold), normalise(other)
        if a != b and (read_number(a) is None or read_number(a) != read_number(b)):
            wrong += [(gold, other)] if score(gold, rf"\boxed{{{other}}}") != 0.0 else []
    assert wrong == []


def test_the_solutions_of_math_state_their_answers() -> None:
    wrong = [
        row["answer"]
        for row in rows("math/math500_test.jsonl")
        if score(row["answer"], row["solution"]) != 1.0
        or score(row["solution"], row["answer"]) != 1
    ]
    assert wrong == []
