"""Presets of losses: what docs/algorithms.md says of each is what the configuration gives."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from llamarl_hpc.config.losses import PRESETS, LossSettings
from llamarl_hpc.config.schema import AlgorithmConfig

DOCUMENT = Path(__file__).parents[2] / "docs" / "algorithms.md"


def documented() -> dict[str, dict[str, str]]:
    """Rows of the table of losses, by loss_type; cells by the head of their column."""
    lines = DOCUMENT.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| loss_type |"))
    table = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    head, _, *rows = table
    return {row[0].strip("`"): dict(zip(head, row, strict=True)) for row in rows}


def bounds(cell: str) -> list[float]:
    """Of a cell such as `0.8, 1.2`, `1 - 3e-4, 1 + 4e-4` or `0, rho = 4; more`."""
    return [number(part.split("=")[-1]) for part in cell.split(";")[0].split(",") if part]


def number(text: str) -> float:
    first, *rest = text.split()
    return float(first) + (float("".join(rest)) if rest else 0.0)


def test_every_loss_has_its_row() -> None:
    assert list(documented()) and set(documented()) == set(PRESETS)


@pytest.mark.parametrize("kind", PRESETS)
def test_bounds_level_and_aggregation_are_the_documented_ones(kind: str) -> None:
    row, settings = documented()[kind], LossSettings.of(AlgorithmConfig(loss_type=kind))
    assert [settings.low, settings.high] == pytest.approx(
        bounds(row["low, high"]) or [0.0, math.inf]
    )
    assert settings.aggregation == row["aggregation"]
    assert settings.level == (
        "sequence" if "with `s` for `r`" in row["loss of one token"] else "token"
    )
    assert settings.is_decoupled == ("`v`" in row["low, high"])
    assert settings.behaviour_max == 4.0 and settings.delta == math.inf


@pytest.mark.parametrize(
    ("keys", "low", "high"),
    [
        ({"loss_type": "aipo", "rho": 2.0}, 0.0, 2.0),
        ({"loss_type": "ppo", "epsilon": 0.1}, 0.9, 1.1),
        ({"loss_type": "ppo", "epsilon": 0.1, "epsilon_high": 0.3}, 0.9, 1.3),
        ({"loss_type": "gspo", "epsilon": 0.1}, 0.9, 1.0004),
        ({"loss_type": "cispo", "epsilon_high": 1.0}, 0.0, 2.0),
    ],
)
def test_keys_take_the_place_of_the_presets_bounds(
    keys: dict[str, Any], low: float, high: float
) -> None:
    settings = LossSettings.of(AlgorithmConfig.model_validate(keys))
    assert (settings.low, settings.high) == pytest.approx((low, high))
