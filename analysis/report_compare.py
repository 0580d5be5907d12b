"""Two runs in one HTML file: curves over one another, what differs, and whether it is noise."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis import charts, report_headline
from analysis.charts import Series
from analysis.comparison import Row, compare_runs
from analysis.diff import compare_steps, config_differences
from analysis.read_run import Run
from analysis.report import fill
from analysis.report_charts import Chart, banded, metric_points
from llamarl_hpc.storage.atomic import write_text

NAMES = ("A", "B")
_CURVES = (
    ("reward/mean", "Reward", "Mean over the rollouts of a step."),
    ("completions/mean_length", "Completion length", "Tokens."),
    ("completions/clipped_ratio", "Cut off", "Share of completions that hit the length limit."),
    ("entropy", "Entropy", "Of the policy where tokens were sampled, nats."),
    ("loss", "Loss", "Per token, over the global batch."),
    ("grad_norm", "Gradient norm", "Before clipping, over all ranks."),
    ("mismatch/kl", "Generator and trainer", "KL divergence of their distributions, nats."),
    ("staleness/mean", "Staleness", "Optimizer steps, mean over the rollouts of a step."),
    ("time/step", "Seconds per step", "From the end of one step to the end of the next."),
)


@dataclass(frozen=True, kw_only=True)
class Head:
    """One of the two runs."""

    letter: str
    name: str
    run_id: str
    folder: str
    state: dict[str, str]
    subtitle: list[str]


def write_comparison(a: Run, b: Run, out: Path | None = None) -> Path:
    """Write the file (default: `compare.html` in the folder of run a) and return where it is."""
    path = a.dir.path / "compare.html" if out is None else out
    write_text(path, render_comparison(a, b))
    return path


def render_comparison(a: Run, b: Run, *, now: float | None = None) -> str:
    """The HTML text."""
    now = now or time.time()
    context = a.without_damage(lambda a: b.without_damage(lambda b: _context(a, b, now)))
    return fill("compare.html.jinja", context)


def _context(a: Run, b: Run, now: float) -> dict[str, Any]:
    runs = (a, b)
    rows = compare_runs(a, b)
    config = config_differences(a.config, b.config)
    return {
        "runs": [_head(letter, run, now) for letter, run in zip(NAMES, runs, strict=True)],
        "rows": rows,
        "sentence": _sentence(rows),
        "charts": [chart for chart in (_accuracy(runs), *_curves(runs)) if chart is not None],
        "config": {key: [_shown(value) for value in pair] for key, pair in config.items()},
        "steps": _steps(compare_steps(a, b)),
        "problems": [problem for run in runs for problem in run.store.problems],
        "written": report_headline.clock(now),
    }


def _head(letter: str, run: Run, now: float) -> Head:
    return Head(
        letter=letter,
        name=str(run.info.get("name") or run.dir.path.parent.name),
        run_id=str(run.info.get("run_id") or run.dir.path.name),
        folder=str(run.dir.path),
        state=report_headline.state(run, run.metric_rows(), now),
        subtitle=report_headline.subtitle(run),
    )


def _sentence(rows: Sequence[Row]) -> str:
    """The answer to the first question: is B better on what is measured?"""
    first = next((row for row in rows if row.decides), None)
    if first is None:
        return "Held-out accuracy was not measured in both runs: there is nothing to judge by."
    if not first.is_alike:
        return (
            f"Held-out accuracy: B minus A is {first.difference}. But the two were measured on "
            "other questions, so this says nothing about which of both is better."
        )
    if first.is_noise:
        return (
            f"Held-out accuracy: B minus A is {first.difference}. That is within noise: these runs "
            "do not tell which of both is better."
        )
    better = "B" if first.rise > 0 else "A"
    return (
        f"Held-out accuracy: B minus A is {first.difference}. That is more than noise: {better} is "
        "better on what was measured, for this seed."
    )


def _shown(value: Any) -> str:
    return "not set" if value is None else f"{value}"


def _steps(steps: dict[str, Any]) -> str:
    if not steps["in_both"]:
        return "No optimizer step is in both."
    if steps["first_different"] is None:
        return f"All {steps['in_both']} steps that are in both trained the same tokens."
    return (
        f"Of {steps['in_both']} steps that are in both, {steps['equal']} trained the same tokens; "
        f"the first that did not is step {steps['first_different']}."
    )


# ---------------------------------------------------------------- curves


def _accuracy(runs: Sequence[Run]) -> Chart | None:
    series = []
    for colour, (letter, run) in enumerate(zip(NAMES, runs, strict=True), start=1):
        found = run.evaluations()
        series.append(
            Series(
                points=[(float(e.policy_version), e.accuracy) for e in found],
                band=[(float(e.policy_version), *e.interval) for e in found],
                colour=colour,
                label=letter,
                dots=True,
                texts=[
                    f"{letter}, version {e.policy_version}: {e.num_correct:g} of {e.num_prompts}"
                    for e in found
                ],
            )
        )
    if not any(one.points for one in series):
        return None
    return Chart(
        title="Held-out accuracy",
        caption="Share of right answers to questions that are never trained on; bands: 95 % "
        "intervals (Wilson).",
        svg=charts.line_chart(
            series,
            title="Held-out accuracy of both runs",
            x_label="policy version",
            y_range=(0.0, None),
            tick=lambda value: f"{100 * value:.0f} %",
        ),
    )


def _curves(runs: Sequence[Run]) -> list[Chart]:
    rows = [run.metric_rows() for run in runs]
    found = []
    for key, title, caption in _CURVES:
        series = [
            Series(points=points, band=band, colour=colour, label=letter)
            for colour, (letter, own) in enumerate(zip(NAMES, rows, strict=True), start=1)
            for points, band in [banded(metric_points(own, key))]
        ]
        if any(one.points for one in series):
            chart = charts.line_chart(series, title=f"{title} of both runs by optimizer step")
            found.append(Chart(title=title, caption=caption, svg=chart))
    return found
