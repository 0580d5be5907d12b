"""Held-out questions one by one, and rollouts as a cell shows them."""

from __future__ import annotations

import math

import pandas as pd
import pytest
from synthetic_run import Plan, make_run

from analysis.heldout import answers, change
from analysis.read_run import Run
from analysis.rollout_view import RolloutView
from llamarl_hpc.errors import ConfigError

PLAN = Plan(num_steps=10, prompts_per_step=2, num_generations=2, heldout=32, eval_steps=5)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(make_run(tmp_path_factory.mktemp("heldout") / "r", PLAN))


def test_answers_agree_with_the_logged_accuracy(run: Run) -> None:
    first, last = answers(run, "first"), answers(run)
    assert len(first) == len(last) == 32
    accuracies = [e.accuracy for e in run.evaluations()]
    assert first["score"].mean() == accuracies[0] and last["score"].mean() == accuracies[-1]
    found = change(first, last)
    assert found.num_questions == 32 and found.before == accuracies[0]
    assert found.better - found.worse == round(32 * found.mean)
    assert found.low < found.mean < found.high
    assert f"{found.better} better" in str(found)
    with pytest.raises(ConfigError, match="no evaluation of version 3; evaluated were 0, 5, 10"):
        answers(run, 3)


def test_a_change_is_counted_over_common_questions_only() -> None:
    before = pd.DataFrame({"score": [0.0, 1.0, 0.0, 1.0]}, index=list("abcd"))
    after = pd.DataFrame({"score": [1.0, 1.0, 1.0, 0.0, 1.0]}, index=list("abcxy"))
    found = change(before, after)
    assert (found.num_questions, found.better, found.worse) == (3, 2, 0)
    assert found.mean == pytest.approx(2 / 3)
    half = 4.302653 * math.sqrt(1 / 3) / math.sqrt(3)
    assert found.high - found.mean == pytest.approx(half, rel=1e-4)


def test_a_cell_shows_a_rollout_with_its_tokens_and_facts(run: Run) -> None:
    rows = run.rollouts(status="trained", steps=(8, 8), text=True)
    view = RolloutView(run, rows["rollout_id"])
    html, text = view._repr_html_(), repr(view)
    for row in rows.itertuples():
        assert row.completion.rstrip(".") in text and f"rollout {row.rollout_id}" in html
    assert "What is " in html and "im_start" not in html  # the question, without the template
    assert "background:rgba(" in html  # staleness 1 spreads the ratio
    assert RolloutView(run, [])._repr_html_() == "<em>none</em>"
