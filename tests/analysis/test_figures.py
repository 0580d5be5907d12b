"""Figures: they show the run's numbers, and nothing where there is nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from synthetic_run import Plan, begin_run, make_run

from analysis.figures import figure
from analysis.panels import OVERVIEW, PANELS, smooth
from analysis.read_run import Run
from analysis.timeline import activity_seconds
from analysis.timeline_figure import time_shares, timeline
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.observability.trace import Span

PLAN = Plan(num_steps=10, prompts_per_step=4, num_generations=4, heldout=16, eval_steps=5)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(make_run(tmp_path_factory.mktemp("figures") / "r", PLAN))


def test_every_panel_has_a_title_labels_and_data(run: Run) -> None:
    there = [name for name in PANELS if name != "flat_groups"]  # not logged by the pretended run
    picture = figure(run, there)
    assert len(picture.axes) == len(there)
    for axes in picture.axes:
        assert axes.get_title(loc="left") and axes.get_xlabel() and axes.get_ylabel()
        assert "nothing yet" not in [text.get_text() for text in axes.texts]
    assert picture._repr_png_().startswith(b"\x89PNG")


def test_the_overview_shows_the_logged_reward_and_accuracy(run: Run) -> None:
    picture = figure(run)
    assert len(picture.axes) == len(OVERVIEW)
    reward = picture.axes[0].lines[0]
    np.testing.assert_allclose(reward.get_ydata(), run.metrics()["reward/mean"])
    accuracy = picture.axes[1].lines[0]
    assert list(np.asarray(accuracy.get_ydata())) == [e.accuracy for e in run.evaluations()]


def test_two_runs_are_told_apart_by_name(run: Run) -> None:
    names = [name for name in PANELS if name != "staleness_shares"]
    picture = figure({"old": run, "new": run}, names)
    (legend,) = [picture.axes[0].get_legend()]
    assert legend is not None and [t.get_text() for t in legend.get_texts()] == ["old", "new"]
    with pytest.raises(ConfigError, match="shows one run, not 2"):
        figure({"old": run, "new": run}, ["staleness_shares"])


def test_a_run_that_has_not_begun_says_so(tmp_path: Path) -> None:
    run = Run(begin_run(tmp_path / "r", PLAN))
    for axes in figure(run, list(PANELS)).axes:
        assert [text.get_text() for text in axes.texts] == ["nothing yet"]
    assert not timeline([]).axes[0].collections
    assert not time_shares([]).axes[0].patches


def test_an_unknown_panel_is_refused_with_the_known_ones(run: Run) -> None:
    with pytest.raises(ConfigError, match=r"no panel 'rewards'; panels are reward, reward_by_time"):
        figure(run, ["rewards"])


def test_seconds_of_activities_sum_to_the_window() -> None:
    spans = [
        Span(name="train", executor="trainer", start=1, end=4),
        Span(name="wait", executor="trainer", start=4, end=5),
        Span(name="score", executor="reward", start=2, end=3),
        Span(name="score", executor="reward", start=2.5, end=4),
    ]
    assert activity_seconds(spans, 0, 6) == {
        "reward": {"score": 2.0, "other": 4.0},
        "trainer": {"train": 3.0, "wait": 1.0, "other": 2.0},
    }


def test_the_timeline_has_a_row_for_each_executor(run: Run) -> None:
    for picture in (timeline(run.spans(1), first_step=2), time_shares(run.spans(1))):
        (axes,) = picture.axes
        rows = [text.get_text() for text in axes.get_yticklabels()]
        assert rows == ["generator.0", "generator.1", "reward", "trainer"]


def test_smoothing_keeps_the_mean_and_passes_over_gaps() -> None:
    assert smooth(np.array([1.0, 2.0, 3.0]), 3).tolist() == [1.5, 2.0, 2.5]
    assert smooth(np.array([1.0, np.nan, 3.0]), 3).tolist() == [1.0, 2.0, 3.0]
    assert smooth(np.array([]), 3).tolist() == []
