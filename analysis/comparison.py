"""The figures of two runs side by side, each with its 95 % interval, and that of the difference."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.cost import cost_sheet
from analysis.cost_text import hours
from analysis.read_run import Run
from analysis.statistics import difference_interval, mean_difference_interval, mean_half_width
from llamarl_hpc.storage.rollout_store.layout import ENUMS

_LENGTH = ENUMS["finish_reason"]["length"]
_MIN_PAIRS = 10  # questions in common, for a paired comparison
_GRADE = "rewards/math_answer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One figure of both runs, as texts; `difference` is that of B minus A."""

    label: str
    note: str
    values: tuple[str, str]
    intervals: tuple[str, str]
    difference: str = ""
    rise: float = math.nan
    low: float = math.nan  # 95 % interval of the rise
    high: float = math.nan
    decides: bool = False  # what runs are made for
    is_alike: bool = True  # both were measured on the same questions

    @property
    def is_noise(self) -> bool:
        """The interval of the difference holds 0, or is not known."""
        return not (self.low > 0.0 or self.high < 0.0)

    @property
    def verdict(self) -> str:
        if math.isnan(self.low):
            return ""
        return "within noise" if self.is_noise else "more than noise"


def compare_runs(a: Run, b: Run) -> list[Row]:
    """Accuracy first, if both have measured it; then reward, texts, time and cost."""
    return [*_accuracy(a, b), *_rollouts(a, b), *_metrics(a, b), *_cost(a, b)]


# ---------------------------------------------------------------- accuracy


def _accuracy(a: Run, b: Run) -> Iterator[Row]:
    both = [run.evaluations() for run in (a, b)]
    if not all(both):
        return
    last = [evaluations[-1] for evaluations in both]
    versions = f"last evaluation (versions {last[0].policy_version} and {last[1].policy_version})"
    scores = [_scores(run, e.policy_version) for run, e in zip((a, b), last, strict=True)]
    common = sorted(scores[0].keys() & scores[1].keys())
    is_alike = 2 * len(common) >= max(min(map(len, scores)), 1)
    if is_alike and len(common) >= _MIN_PAIRS:
        rise, half = _mean_and_half([scores[1][q] - scores[0][q] for q in common])
        low, high = rise - half, rise + half
        note = f"question by question over {len(common)} in both"
    else:
        rise = last[1].accuracy - last[0].accuracy
        low, high = difference_interval(*((e.num_correct, e.num_prompts) for e in last))
        note = "taken as independent" if is_alike else "the runs asked other questions"
    yield Row(
        label="held-out accuracy",
        note=f"{versions}; {note}",
        values=(f"{100 * last[0].accuracy:.1f} %", f"{100 * last[1].accuracy:.1f} %"),
        intervals=(_percents(last[0].interval), _percents(last[1].interval)),
        difference=f"{100 * rise:+.1f} points (95 %: {100 * low:+.1f} to {100 * high:+.1f})",
        rise=rise,
        low=low,
        high=high,
        decides=True,
        is_alike=is_alike,
    )


def _percents(interval: tuple[float, float]) -> str:
    return f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f} %"


def _scores(run: Run, version: int) -> dict[str, float]:
    """Mean score of each question of an evaluation, by prompt id."""
    name = _GRADE if "math_answer" in run.reward_names else "reward"
    mask = run.group_mask(purpose="eval", steps=(version, version))
    rows = run.table("rollouts", ["prompt", name], mask)
    found: dict[str, list[float]] = {}
    names = run.decoded("prompt", rows["prompt"])
    for question, score in zip(names, rows[name].tolist(), strict=True):
        found.setdefault(question, []).append(score)
    means = {question: statistics.fmean(scores) for question, scores in found.items()}
    return {question: mean for question, mean in means.items() if not math.isnan(mean)}


def _mean_and_half(values: list[float]) -> tuple[float, float]:
    return statistics.fmean(values), mean_half_width(statistics.stdev(values), len(values))


# ---------------------------------------------------------------- rollouts of the last quarter


def _rollouts(a: Run, b: Run) -> Iterator[Row]:
    late = [_late_groups(run) for run in (a, b)]
    note = "last quarter of the steps, over prompt groups"
    for label, key, form in (
        ("reward", "reward", "{:.3f}"),
        ("tokens of a completion", "length", "{:.1f}"),
        ("cut off at the length limit", "truncated", "{:.3f}"),
    ):
        yield from _measured(label, note, [values[key] for values in late], form)


def _late_groups(run: Run) -> dict[str, list[float]]:
    """Means of the groups of the last quarter of the steps."""
    mask = run.group_mask(purpose="train", status="trained")
    names = ["step", "group_id", "reward", "completion_length", "finish_reason"]
    rows = run.table("rollouts", names, mask)
    if not len(rows["step"]):
        return {"reward": [], "length": [], "truncated": []}
    steps = np.unique(rows["step"])
    late = rows["step"] >= steps[-max(1, len(steps) // 4)]
    _, of = np.unique(rows["group_id"][late], return_inverse=True)
    counts = np.bincount(of)
    columns = {
        "reward": rows["reward"],
        "length": rows["completion_length"],
        "truncated": rows["finish_reason"] == _LENGTH,
    }
    return {
        name: (np.bincount(of, weights=values[late]) / counts).tolist()
        for name, values in columns.items()
    }


def _measured(label: str, note: str, both: list[list[float]], form: str) -> Iterator[Row]:
    """A mean of values of both runs; nothing when one has none."""
    known = [[value for value in values if math.isfinite(value)] for values in both]
    if not all(known):
        return
    means = [statistics.fmean(values) for values in known]
    low, high = mean_difference_interval(*known)
    rise = means[1] - means[0]
    signed = form.replace("{:", "{:+")
    difference = signed.format(rise)
    if not math.isnan(low):
        difference += f" (95 %: {signed.format(low)} to {signed.format(high)})"
    yield Row(
        label=label,
        note=note,
        values=(form.format(means[0]), form.format(means[1])),
        intervals=(_interval(known[0], form), _interval(known[1], form)),
        difference=difference,
        rise=rise,
        low=low,
        high=high,
    )


def _interval(values: list[float], form: str) -> str:
    if len(values) < 2:
        return ""
    mean, half = _mean_and_half(values)
    return f"{form.format(mean - half)} to {form.format(mean + half)}"


# ---------------------------------------------------------------- steps and cost


def _metrics(a: Run, b: Run) -> Iterator[Row]:
    rows = [run.metric_rows() for run in (a, b)]
    for label, key, form in (
        ("seconds per step", "time/step", "{:.2f}"),
        ("completion tokens per second", "perf/completion_tokens_per_second", "{:.0f}"),
        ("staleness", "staleness/mean", "{:.2f}"),
        ("entropy", "entropy", "{:.3f}"),
    ):
        both = [_late(own, key) for own in rows]
        yield from _measured(label, "last quarter of the steps, over steps", both, form)


def _late(rows: list[dict[str, Any]], key: str) -> list[float]:
    late = rows[-max(1, len(rows) // 4) :]
    return [float(row[key]) for row in late if isinstance(row.get(key), int | float)]


def _cost(a: Run, b: Run) -> Iterator[Row]:
    sheets = [cost_sheet(run) for run in (a, b)]
    for unit in dict.fromkeys(unit for sheet in sheets for unit in sheet.totals):
        totals = [sheet.totals.get(unit, 0.0) for sheet in sheets]
        yield Row(
            label=f"{unit}-hours",
            note="held by all executors, over all attempts",
            values=(hours(totals[0]), hours(totals[1])),
            intervals=("", ""),
            difference=f"{totals[1] / totals[0]:.2f} times" if totals[0] else "",
        )
