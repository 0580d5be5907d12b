"""The charts of the report: from a run's figures to titled SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis import charts
from analysis.charts import Point, Series
from analysis.read_run import Evaluation, Run

Metrics = Sequence[dict[str, Any]]
MAX_BARS = 48
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
    points = _points(rows, "reward/mean")
    window = max(3, len(points) // 12)
    series = [
        Series(points=charts.thin(points), faint=True),
        Series(points=charts.thin(charts.smooth(points, window)), label="reward"),
    ]
    if len(names) > 1:
        for colour, name in enumerate(names[:3], start=2):
            component = charts.smooth(_points(rows, f"rewards/{name}/mean"), window)
            if component:
                label = name.replace("_", " ")[:18]
                series.append(Series(points=charts.thin(component), colour=colour, label=label))
    return Chart(
        title="Reward",
        caption=f"Mean over the rollouts of a step (pale), and over {window} steps.",
        svg=charts.line_chart(series, title="Mean reward by optimizer step"),
    )


def metric_chart(
    rows: Metrics, key: str, title: str, caption: str, colour: int = 1
) -> Chart | None:
    """One metric over the steps; None when the run does not have it."""
    points = _points(rows, key)
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
    mean = charts.thin(_points(rows, "completions/mean_length"))
    lows = charts.thin(_points(rows, "completions/min_length"))
    highs = charts.thin(_points(rows, "completions/max_length"))
    band = [(x, low, high) for (x, low), (_, high) in zip(lows, highs, strict=False)]
    clipped = [y for _, y in _points(rows, "completions/clipped_ratio")]
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
    rho = (run.config.get("algorithm") or {}).get("rho")
    bound = f" The loss truncates above {rho:g}." if isinstance(rho, int | float) else ""
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


def _points(rows: Metrics, key: str) -> list[Point]:
    return [
        (float(row["step"]), float(row[key]))
        for row in rows
        if isinstance(row.get(key), int | float) and math.isfinite(row[key])
    ]


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"
