"""Tables behind the figures: numbers of a pretended run against its metrics, and by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from synthetic_run import Plan, begin_run, make_run

from analysis import curves
from analysis.read_run import Run
from analysis.statistics import mean_half_width, t_quantile95

PLAN = Plan(num_steps=10, prompts_per_step=4, num_generations=4, heldout=16, eval_steps=5)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(make_run(tmp_path_factory.mktemp("curves") / "r", PLAN))


def test_the_tables_agree_with_what_the_run_logged(run: Run) -> None:
    metrics = run.metrics()
    reward, lengths = curves.reward_by_step(run), curves.lengths_by_step(run)
    assert list(reward.index) == list(range(10))
    assert list(reward["num_groups"]) == [4] * 10
    np.testing.assert_allclose(reward["mean"], metrics["reward/mean"], atol=1e-6)
    np.testing.assert_allclose(lengths["mean"], metrics["completions/mean_length"])
    np.testing.assert_allclose(lengths["truncated"], metrics["completions/clipped_ratio"])
    right = curves.reward_by_step(run, "math_answer")
    np.testing.assert_allclose(right["mean"], metrics["rewards/math_answer/mean"], atol=1e-6)
    staleness = curves.staleness_by_step(run)
    assert set(staleness.columns) == {0, 1} and (staleness.sum(axis=1) == 16).all()
    share = staleness[1] / 16
    np.testing.assert_allclose(share, metrics["staleness/mean"])


def test_an_interval_is_that_of_the_mean_over_groups(run: Run) -> None:
    rows = run.rollouts(status="trained", steps=(3, 3))
    groups = rows.groupby("group")["reward"].mean()
    half = 3.182446 * groups.std() / math.sqrt(4)
    row = curves.reward_by_step(run).loc[3]
    assert row["high"] - row["mean"] == pytest.approx(half, rel=2e-3)
    assert row["mean"] - row["low"] == pytest.approx(half, rel=2e-3)


def test_accuracy_has_a_row_for_each_evaluated_version(run: Run) -> None:
    table = curves.evaluations(run)
    assert list(table.index) == [0, 5, 10]
    assert (table["num_prompts"] == 16).all()
    assert (table["low"] < table["accuracy"]).all() and (table["accuracy"] < table["high"]).all()


def test_the_ratio_spreads_with_staleness_and_counts_every_trained_token(run: Run) -> None:
    table = curves.ratio_by_staleness(run)
    spread = np.log(table["p95"] / table["p5"]) / (2 * 1.645)
    assert spread[0] == pytest.approx(0.02, rel=0.1) and spread[1] == pytest.approx(0.12, rel=0.1)
    trained = run.rollouts(status="trained")
    assert table["num_tokens"].sum() == trained["completion_length"].sum()
    assert (table["above_rho"] == 0).all()


@pytest.mark.parametrize(
    ("loss", "bound"), [("aipo", 1.05), ("decoupled_ppo", 1.05), ("ppo", None), ("reinforce", None)]
)
def test_only_a_loss_that_has_the_bound_cuts_at_rho(
    run: Run, monkeypatch: pytest.MonkeyPatch, loss: str, bound: float | None
) -> None:
    config = run.config | {"algorithm": {"loss_type": loss, "rho": 1.05}}
    monkeypatch.setattr(run, "config", config)
    assert curves.rho_of(run) == bound
    cut = curves.ratio_by_staleness(run)["above_rho"]
    assert (cut[1] > 0.1) == (bound is not None)


def test_a_run_that_has_not_begun_gives_empty_tables(tmp_path: Path) -> None:
    run = Run(begin_run(tmp_path / "r", PLAN))
    tables = [
        curves.evaluations(run),
        curves.reward_by_step(run),
        curves.staleness_by_step(run),
        curves.lengths_by_step(run),
        curves.ratio_by_staleness(run),
    ]
    assert [len(table) for table in tables] == [0] * 5


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (7, 2.3646), (30, 2.0423)]
)
def test_quantiles_of_students_t(freedom: int, quantile: float) -> None:
    assert t_quantile95(freedom) == pytest.approx(quantile, rel=2e-3)


def test_a_single_value_has_no_interval() -> None:
    assert math.isnan(mean_half_width(0.0, 1)) and math.isnan(t_quantile95(0))
    assert mean_half_width(2.0, 3) == pytest.approx(4.3027 * 2.0 / math.sqrt(3), rel=1e-4)
