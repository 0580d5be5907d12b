"""docs/config.md says what the schema says."""

from __future__ import annotations

from pathlib import Path

from llamarl_hpc.config.docs import render
from llamarl_hpc.config.fields import all_keys, find

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == render(), "run 'make docs' and commit docs/config.md"


def test_every_key_is_described() -> None:
    silent = [key.name for key in all_keys() if key.leaf not in ("N", "NAME", "kind")]
    silent = [name for name in silent if not _described(name)]
    assert silent == []


def _described(name: str) -> bool:
    return any(key.description for key in all_keys() if key.name == name)


def test_every_row_of_the_page_has_four_cells() -> None:
    rows = [line for line in render().splitlines() if line.startswith("| `")]
    assert len(rows) > 80
    assert {line.replace("\\|", "").count("|") for line in rows} == {5}


def test_keys_are_found_by_concrete_place() -> None:
    found = find(("rewards", 3, "weight"))
    assert found is not None and found.name == "rewards.N.weight"
    assert find(("launch", "env", "ANYTHING")) is not None
    assert find(("trainer", "nothing")) is None
