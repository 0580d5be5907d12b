"""What a panel of a figure shows: one question about a run, or about several.

A panel draws on the axes that it is given and reads `metrics.jsonl` alone, so that it is quick
while the run goes on, unless its name is in `STORE_PANELS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from analysis import curves
from analysis.read_run import Run
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.types import Array

Runs = Mapping[str, Run]
# Okabe and Ito's colours: told apart by everybody, and in print
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5A5A5A")
_STEP = "optimizer step"


def style(axes: Axes) -> None:
    """Thin lines, no box."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=9.5, fontweight="bold")
    axes.set_xlabel(x, fontsize=8.5)
    axes.set_ylabel(y, fontsize=8.5)


def legend(axes: Axes, *, least: int = 2) -> None:
    """Above the data; none for fewer than `least` entries."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) < least:
        return
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.22 * (high - low))  # room for it
    axes.legend(
        handles,
        labels,
        loc="upper left",
        ncols=min(len(labels), 3),
        fontsize=7.5,
        frameon=False,
        borderpad=0.1,
        handlelength=1.4,
        columnspacing=1.2,
    )


# ------------------------------------------------------------------ panels from metrics.jsonl


def _reward(axes: Axes, runs: Runs) -> None:
    for colour, name, run in _coloured(runs):
        steps, values = points(run, "reward/mean")
        window = smooth_window(len(steps))
        axes.plot(steps, values, color=colour, alpha=0.3, linewidth=0.9)
        text = name or f"mean of {window} steps"
        axes.plot(steps, smooth(values, window), color=colour, linewidth=1.8, label=text)
    label(axes, "Reward", _STEP, "mean reward of a step")
    if len(runs) > 1:
        legend(axes)


def _reward_by_time(axes: Axes, runs: Runs) -> None:
    for colour, name, run in _coloured(runs):
        steps, seconds = points(run, "time/elapsed")
        known, values = points(run, "reward/mean")
        values = smooth(values, smooth_window(len(values)))[np.isin(known, steps)]
        minutes = seconds[np.isin(steps, known)] / 60
        axes.plot(minutes, values, color=colour, linewidth=1.8, label=name)
    label(axes, "Reward by time", "minutes since the start of the run", "mean reward, smoothed")
    if len(runs) > 1:
        legend(axes)


def _accuracy(axes: Axes, runs: Runs) -> None:
    for colour, name, run in _coloured(runs):
        table = curves.evaluations(run)
        if table.empty:
            continue
        x, y = table.index.to_numpy(), table["accuracy"].to_numpy()
        errors = np.clip([y - table["low"], table["high"] - y], 0.0, 1.0)
        axes.errorbar(
            x,
            y,
            errors,
            color=colour,
            marker="o",
            markersize=4,
            capsize=2,
            linewidth=1.4,
            elinewidth=1.0,
            label=name,
        )
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    label(axes, "Held-out accuracy", "policy version", "right answers, 95 % interval")
    if len(runs) > 1:
        legend(axes)


def _staleness(axes: Axes, runs: Runs) -> None:
    for colour, name, run in _coloured(runs):
        steps, mean = points(run, "staleness/mean")
        axes.plot(steps, mean, color=colour, linewidth=1.6, label=name or "mean")
        if len(runs) == 1:
            steps, high = points(run, "staleness/max")
            axes.plot(steps, high, color="0.1", linewidth=1.3, linestyle=":", label="largest")
    axes.set_ylim(bottom=-0.05)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    label(axes, "Staleness", _STEP, "staleness (steps)")
    legend(axes)


def _length(axes: Axes, runs: Runs) -> None:
    for colour, name, run in _coloured(runs):
        steps, mean = points(run, "completions/mean_length")
        low, high = (points(run, f"completions/{end}_length")[1] for end in ("min", "max"))
        if len(low) == len(high) == len(steps):
            text = "shortest to longest" if len(runs) == 1 else None
            axes.fill_between(steps, low, high, color=colour, alpha=0.14, linewidth=0, label=text)
        axes.plot(steps, mean, color=colour, linewidth=1.6, label=name or "mean")
    axes.set_ylim(bottom=0)
    label(axes, "Completion length", _STEP, "length (tokens)")
    legend(axes)


def _truncated(axes: Axes, runs: Runs) -> None:
    _share(axes, runs, "completions/clipped_ratio")
    label(axes, "Truncated completions", _STEP, "share at the length limit")


def _flat_groups(axes: Axes, runs: Runs) -> None:
    _share(axes, runs, "frac_reward_zero_std")
    label(axes, "Groups without spread", _STEP, "share of prompt groups")


def _share(axes: Axes, runs: Runs, key: str) -> None:
    for colour, name, run in _coloured(runs):
        axes.plot(*points(run, key), color=colour, linewidth=1.6, label=name)
    _percent_axis(axes)
    if len(runs) > 1:
        legend(axes)


def _off_policy(axes: Axes, runs: Runs) -> None:
    names = {"ess": ("effective (ESS)", "-"), "clip_frac": ("cut by a bound", ":")}
    for number, (colour, _, run) in enumerate(_coloured(runs)):
        for index, (key, (text, line)) in enumerate(names.items()):
            alone = len(runs) == 1
            axes.plot(
                *points(run, key),
                color=COLOURS[index] if alone else colour,
                linestyle="-" if alone else line,
                linewidth=1.6,
                label=text if number == 0 else None,
            )
    _percent_axis(axes)
    label(axes, "Off-policy correction", _STEP, "share of tokens")
    legend(axes)


def _mismatch(axes: Axes, runs: Runs) -> None:
    for colour, name, run in _coloured(runs):
        axes.plot(*points(run, "mismatch/kl"), color=colour, linewidth=1.6, label=name)
    label(axes, "Generator and trainer", _STEP, "KL divergence (nats)")
    if len(runs) > 1:
        legend(axes)


def _idle(axes: Axes, runs: Runs) -> None:
    executors = ("trainer", "generator", "reward")
    styles = dict(zip(executors, ("-", "--", ":"), strict=True))
    for number, (colour, _, run) in enumerate(_coloured(runs)):
        for index, executor in enumerate(executors):
            steps, values = points(run, f"idle_ratio/{executor}")
            if not len(steps):
                continue
            smoothed = smooth(values, smooth_window(len(steps)))
            alone = len(runs) == 1
            axes.plot(
                steps,
                smoothed,
                color=COLOURS[index] if alone else colour,
                linestyle="-" if alone else styles[executor],
                linewidth=1.6,
                label=executor if alone or number == 0 else None,
            )
    _percent_axis(axes)
    label(axes, "Idle", _STEP, "share of a step without work")
    legend(axes)


def _seconds(axes: Axes, runs: Runs) -> None:
    keys = {"step": "whole step", "train": "training", "wait_for_batch": "waiting for a batch"}
    for colour, name, run in _coloured(runs):
        for index, (key, text) in enumerate(keys.items() if len(runs) == 1 else [("step", name)]):
            steps, values = points(run, f"time/{key}")
            if len(steps):
                shade = COLOURS[index] if len(runs) == 1 else colour
                axes.plot(steps, values, color=shade, linewidth=1.4, label=text)
    axes.set_ylim(bottom=0)
    label(axes, "Time of a step", _STEP, "seconds")
    legend(axes)


# ------------------------------------------------------------------ panels from the rollout store


def _reward_band(axes: Axes, runs: Runs) -> None:
    for colour, name, run in _coloured(runs):
        table = curves.reward_by_step(run)
        window = smooth_window(len(table))
        x = table.index.to_numpy()
        low, high = (smooth(table[side].to_numpy(), window) for side in ("low", "high"))
        axes.fill_between(
            x,
            low,
            high,
            color=colour,
            alpha=0.18,
            linewidth=0,
            label="95 % interval of one step" if len(runs) == 1 else None,
        )
        mean = smooth(table["mean"].to_numpy(), window)
        axes.plot(x, mean, color=colour, linewidth=1.8, label=name or f"mean of {window} steps")
    label(axes, "Reward", _STEP, "reward")
    legend(axes)


def _components(axes: Axes, runs: Runs) -> None:
    for number, (colour, _, run) in enumerate(_coloured(runs)):
        for index, component in enumerate(run.reward_names[: len(COLOURS)]):
            table = curves.reward_by_step(run, component)
            window = smooth_window(len(table))
            axes.plot(
                table.index.to_numpy(),
                smooth(table["mean"].to_numpy(), window),
                color=COLOURS[index] if len(runs) == 1 else colour,
                linestyle="-" if len(runs) == 1 else ("-", "--", ":", "-.")[index % 4],
                linewidth=1.6,
                label=component if len(runs) == 1 or number == 0 else None,
            )
    label(axes, "Reward by component", _STEP, "score before weights")
    legend(axes, least=1)


def _staleness_shares(axes: Axes, runs: Runs) -> None:
    table = curves.staleness_by_step(_only(runs, "staleness_shares"))
    shares = table.div(table.sum(axis=1), axis=0)
    below = np.zeros(len(shares))
    x = shares.index.to_numpy()
    for index, lag in enumerate(shares.columns):
        height = shares[lag].to_numpy()
        colour = COLOURS[index % len(COLOURS)]
        axes.bar(x, height, width=1.0, bottom=below, color=colour, label=f"{lag}", linewidth=0)
        below += height
    _percent_axis(axes)
    axes.grid(visible=False)
    label(axes, "Staleness of what was trained", _STEP, "share of rollouts")
    legend(axes)


def _ratio(axes: Axes, runs: Runs) -> None:
    """5 %, quartiles, 95 % of the tokens' importance ratio, at each staleness."""
    width = min(0.7 / len(runs), 0.3)
    for number, (colour, name, run) in enumerate(_coloured(runs)):
        table = curves.ratio_by_staleness(run)
        if table.empty:
            continue
        x = table.index.to_numpy() + (number - (len(runs) - 1) / 2) * width
        p5, p25, p75, p95 = (table[q].to_numpy() for q in ("p5", "p25", "p75", "p95"))
        axes.vlines(x, p5, p95, color=colour, linewidth=1.2, label=name or "5 to 95 %")
        text = "quartiles" if len(runs) == 1 else None
        axes.bar(x, p75 - p25, width * 0.7, bottom=p25, color=colour, alpha=0.45, label=text)
        ends = (x - width * 0.35, x + width * 0.35)
        text = "median" if len(runs) == 1 else "_"  # which legends leave out
        axes.hlines(table["median"].to_numpy(), *ends, color="0.1", linewidth=1.4, label=text)
    if has_data(axes):
        axes.axhline(1.0, color="0.6", linewidth=0.8, zorder=0)
    label(axes, "Importance ratio", "staleness (steps)", "trainer / generator probability")
    legend(axes)


PANELS: dict[str, Callable[[Axes, Runs], None]] = {
    "reward": _reward,
    "reward_by_time": _reward_by_time,
    "accuracy": _accuracy,
    "staleness": _staleness,
    "length": _length,
    "truncated": _truncated,
    "flat_groups": _flat_groups,
    "off_policy": _off_policy,
    "mismatch": _mismatch,
    "idle": _idle,
    "seconds": _seconds,
    "reward_band": _reward_band,
    "components": _components,
    "staleness_shares": _staleness_shares,
    "ratio": _ratio,
}
STORE_PANELS = ("reward_band", "components", "staleness_shares", "ratio")
OVERVIEW = ("reward", "accuracy", "staleness", "length", "idle", "seconds")


# ------------------------------------------------------------------ small things


def points(run: Run, key: str) -> tuple[Array, Array]:
    """float64 [N] steps and values of a metric, where it is a number."""
    found = [
        (float(row["step"]), float(row[key]))
        for row in run.metric_rows()
        if isinstance(row.get(key), int | float) and math.isfinite(row[key])
    ]
    table = np.array(found, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def smooth(values: Array, window: int) -> Array:
    """Centred mean over `window` values, over fewer at the ends; NaN counts as absent."""
    known = ~np.isnan(values)
    kernel = np.ones(min(window, max(len(values), 1)))
    if not len(values):
        return values
    sums = np.convolve(np.where(known, values, 0.0), kernel, mode="same")
    counts = np.convolve(known.astype(float), kernel, mode="same")
    result: Array = np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)
    return result


def smooth_window(count: int) -> int:
    """Steps that are averaged in a curve of `count` steps."""
    return min(max(3, count // 12), 50) if count > 5 else 1


def _percent_axis(axes: Axes) -> None:
    axes.set_ylim(-0.02, 1.02)
    axes.set_yticks([0.0, 0.25, 0.5, 0.75, 1.0])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def has_data(axes: Axes) -> bool:
    """Whether anything was drawn; a line without points is nothing."""
    lines = any(len(np.asarray(line.get_xdata())) for line in axes.lines)
    return lines or bool(axes.patches)


def _coloured(runs: Runs) -> list[tuple[str, str, Run]]:
    return [
        (COLOURS[index % len(COLOURS)], name, run) for index, (name, run) in enumerate(runs.items())
    ]


def _only(runs: Runs, panel: str) -> Run:
    if len(runs) > 1:
        raise ConfigError(f"the panel '{panel}' shows one run, not {len(runs)}; leave it out")
    return next(iter(runs.values()))
