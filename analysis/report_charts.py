"""The charts of the report: from a run's figures to titled SVG."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis import charts
from analysis.charts import Point, Series
from analysis.curves import rho_of
from analysis.read_run import Evaluation, Run
from analysis.statistics import mean_half_width

Metrics = Sequence[dict[str, Any]]
MAX_BARS = 48
_WINDOWS, _LEAST_WINDOW = 12, 5  # a curve is a mean over a twelfth of the steps
MAX_RATIO_TOKENS = 4_000_000
_RATIO_EDGES = np.linspace(0.0, 3.0, 61)


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    caption: str
    svg: str


def accuracy_chart(evaluations: Sequence[Evaluation]) -> Chart:
    points = [(float(e.policy_version), e.accuracy) for e in evaluations]
    series = Series(
        points=points,
        band=[(float(e.policy_version), *e.interval) for e in evaluations],
        dots=True,
        texts=[
            f"version {e.policy_version}: {e.num_correct:g} of {e.num_prompts} right"
            for e in evaluations
        ],
    )
    return Chart(
        title="Held-out accuracy",
        caption="Share of right answers to questions that are never trained on; band: 95 % "
        "interval (Wilson).",
        svg=charts.line_chart(
            [series],
            title="Held-out accuracy by policy version",
            x_label="policy version",
            y_range=(0.0, None),
            tick=_percent,
        ),
    )


def reward_chart(rows: Metrics, names: Sequence[str]) -> Chart:
    points = metric_points(rows, "reward/mean")
    window = curve_window(len(points))
    means, band = banded(points)
    series = [
        Series(points=charts.thin(points), faint=True),
        Series(points=means, band=band, label="reward"),
    ]
    if len(names) > 1:
        for colour, name in enumerate(names[:3], start=2):
            component = charts.smooth(metric_points(rows, f"rewards/{name}/mean"), window)
            if component:
                label = name.replace("_", " ")[:18]
                series.append(Series(points=charts.thin(component), colour=colour, label=label))
    return Chart(
        title="Reward",
        caption=f"Mean over the rollouts of a step (pale), and over {window} steps, with its 95 % "
        "interval (steps taken as independent).",
        svg=charts.line_chart(series, title="Mean reward by optimizer step"),
    )


def metric_chart(
    rows: Metrics, key: str, title: str, caption: str, colour: int = 1
) -> Chart | None:
    """One metric over the steps; None when the run does not have it."""
    points = metric_points(rows, key)
    if not points:
        return None
    smoothed = charts.smooth(points, max(3, len(points) // 12))
    return Chart(
        title=title,
        caption=caption,
        svg=charts.line_chart(
            [
                Series(points=charts.thin(points), colour=colour, faint=True),
                Series(points=charts.thin(smoothed), colour=colour),
            ],
            title=f"{title} by optimizer step",
        ),
    )


def length_chart(rows: Metrics) -> Chart:
    mean = charts.thin(metric_points(rows, "completions/mean_length"))
    lows = charts.thin(metric_points(rows, "completions/min_length"))
    highs = charts.thin(metric_points(rows, "completions/max_length"))
    band = [(x, low, high) for (x, low), (_, high) in zip(lows, highs, strict=False)]
    clipped = [y for _, y in metric_points(rows, "completions/clipped_ratio")]
    share = f"{100 * clipped[-1]:.1f} %" if clipped else "an unknown share"
    return Chart(
        title="Completion length",
        caption=f"Tokens: mean, and shortest to longest. In the last step {share} were cut off.",
        svg=charts.line_chart(
            [Series(points=mean, colour=3, band=band)],
            title="Completion length by optimizer step",
            y_range=(0.0, None),
        ),
    )


def staleness_chart(run: Run) -> Chart:
    mask = run.group_mask(status="trained")
    rows = run.table("rollouts", ["step", "staleness"], mask)
    caption = "Optimizer steps between the oldest token of a rollout and its use."
    title = "Staleness"
    if not len(rows["step"]):
        return Chart(title=title, caption=caption, svg=charts.nothing(title))
    first, last = int(rows["step"].min()), int(rows["step"].max())
    edges = np.unique(np.linspace(first, last + 1, min(MAX_BARS, last - first + 1) + 1).astype(int))
    most = min(int(rows["staleness"].max()), 4)
    lags = np.clip(rows["staleness"], 0, most)
    bars = []
    for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        inside = (rows["step"] >= a) & (rows["step"] < b)
        counts = np.bincount(lags[inside], minlength=most + 1)
        text = f"step {a}" if b == a + 1 else f"steps {a}-{b - 1}"
        bars.append((text, counts.astype(float).tolist()))
    names = [f"{level}+" if level == 4 else f"{level}" for level in range(most + 1)]
    return Chart(
        title=title,
        caption=f"{caption} Mean {rows['staleness'].mean():.2f}, never above "
        f"{int(rows['staleness'].max())}.",
        svg=charts.stacked_bars(
            bars,
            names,
            title="Share of rollouts by staleness over the optimizer steps",
            x_label="optimizer step",
            first_x=float(first),
            last_x=float(last + 1),
        ),
    )


def ratio_chart(run: Run) -> Chart:
    """Over the newest tokens; bounded, however long the run."""
    counts, seen = np.zeros(len(_RATIO_EDGES) - 1), 0
    for _, file in run.store.scan(newest_first=True):
        trainer = file.read("tokens/logprob_trainer")
        known = ~np.isnan(trainer)
        ratio = np.exp(trainer[known] - file.read("tokens/logprob_behaviour")[known])
        inside = np.clip(ratio, _RATIO_EDGES[0], _RATIO_EDGES[-1] - 1e-6)
        counts += np.histogram(inside, _RATIO_EDGES)[0]
        seen += int(known.sum())
        if seen > MAX_RATIO_TOKENS:
            break
    rho = rho_of(run)
    bound = "" if rho is None else f" The loss truncates above {rho:g}."
    return Chart(
        title="Importance ratio",
        caption=f"Trainer's over generator's probability of {seen:,} tokens (the last bar: 2.95 "
        f"and more).{bound}",
        svg=charts.histogram(
            counts.tolist(),
            _RATIO_EDGES.tolist(),
            title="Distribution of the importance ratio",
            x_label="ratio, tokens on a logarithmic height",
        ),
    )


def metric_points(rows: Metrics, key: str) -> list[Point]:
    """(step, value) of a metric, where it is a number."""
    return [
        (float(row["step"]), float(row[key]))
        for row in rows
        if isinstance(row.get(key), int | float) and math.isfinite(row[key])
    ]


def banded(points: Sequence[Point]) -> tuple[list[Point], list[tuple[float, float, float]]]:
    """Moving means over a twelfth of the steps (five at least), with their 95 % intervals: steps
    are taken as independent. At both ends the window stops moving; no band leaves the values."""
    window = curve_window(len(points))
    every = max(1, len(points) // charts.MAX_POINTS)
    means, band = list[Point](), list[tuple[float, float, float]]()
    for index in range(0, len(points), every):
        first = min(max(0, index - window // 2), len(points) - window)
        around = [y for _, y in points[first : first + window]]
        x, mean = points[index][0], statistics.fmean(around)
        half = mean_half_width(statistics.stdev(around), window) if window > 1 else 0.0
        means.append((x, mean))
        band.append((x, max(mean - half, min(around)), min(mean + half, max(around))))
    return means, band


def curve_window(count: int) -> int:
    """Steps that are averaged in a curve of `count` steps."""
    return min(max(_LEAST_WINDOW, count // _WINDOWS), count)


def off_policy_chart(rows: Metrics) -> Chart | None:
    """How much of a batch its importance weights leave; None when the run does not say."""
    names = {"ess": "effective tokens", "clip_frac": "cut"}
    series = [
        Series(points=charts.thin(points), colour=colour, label=label)
        for colour, (key, label) in enumerate(names.items(), start=1)
        if (points := metric_points(rows, key))
    ]
    if not series:
        return None
    return Chart(
        title="Off-policy correction",
        caption="Tokens that carry the importance weights (ESS: 100 % on policy, near 0 when a few "
        "carry all), and tokens whose weight or gradient a bound cut.",
        svg=charts.line_chart(
            series,
            title="Effective tokens and cut tokens by optimizer step",
            y_range=(0.0, 1.0),
            tick=_percent,
        ),
    )


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"
