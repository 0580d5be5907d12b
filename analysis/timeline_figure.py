"""Who worked when, and on what: the spans of a run as figures for notebooks."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from analysis.figures import Picture, new_picture
from analysis.panels import COLOURS, label, style
from analysis.timeline import activity_seconds, executors, union, within
from llamarl_hpc.observability.trace import Span

_COLOUR_OF = {
    "generate": COLOURS[0],
    "load_weights": COLOURS[5],
    "score": COLOURS[2],
    "refer": "#6A3D9A",
    "train": COLOURS[1],
    "publish_weights": COLOURS[4],
    "checkpoint": COLOURS[3],
    "wait": "0.88",
    "other": "0.70",
}


def timeline(spans: Sequence[Span], *, first_step: int | None = None, steps: int = 6) -> Picture:
    """One bar per executor over `steps` optimizer steps of one attempt, by default from its
    middle."""
    trained = sorted((s for s in spans if s.name == "train"), key=lambda span: span.start)
    rows = executors(spans)
    picture = new_picture(9.0, 1.3 + 0.36 * max(len(rows), 1))
    axes = picture.add_subplot()
    style(axes)
    if trained:
        begin = max(0, (len(trained) - steps) // 2)
        if first_step is not None:
            begin = next((i for i, s in enumerate(trained) if s.args["step"] >= first_step), begin)
        shown = trained[begin : begin + steps]
        start, end = shown[0].start, shown[-1].end
        for row, executor in enumerate(rows):
            _bars(axes, row, [s for s in spans if s.executor == executor], start, end)
        axes.set_xlim(0.0, end - start)
        for span in shown:
            axes.axvline(span.end - start, color="0.35", linewidth=0.7, linestyle=":")
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(visible=False)
    label(axes, "Who worked when (dotted: a step was trained)", "seconds", "")
    _activities(axes, _in_order({s.name for s in spans if s.executor in rows}))
    return picture


def time_shares(spans: Sequence[Span]) -> Picture:
    """What each executor spent its time on, from the first training of an attempt to the last."""
    trained = [span for span in spans if span.name == "train"]
    rows = executors(spans)
    picture = new_picture(9.0, 1.3 + 0.36 * max(len(rows), 1))
    axes = picture.add_subplot()
    style(axes)
    names: list[str] = []
    if trained:
        start, end = min(s.start for s in trained), max(s.end for s in trained)
        table = activity_seconds(spans, start, end)
        done = {name for parts in table.values() for name, value in parts.items() if value}
        names = _in_order(done)
        for row, executor in enumerate(rows):
            left = 0.0
            for name in names:
                share = table[executor].get(name, 0.0) / max(end - start, 1e-9)
                axes.barh(row, share, 0.62, left=left, color=_colour(name))
                if share > 0.05:
                    dark = name not in ("wait", "other", "load_weights", "publish_weights")
                    axes.text(
                        left + share / 2,
                        row,
                        f"{100 * share:.0f} %",
                        ha="center",
                        va="center",
                        fontsize=7.5,
                        color="white" if dark else "0.15",
                    )
                left += share
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0.0, 1.0)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xticks([0.0, 0.25, 0.5, 0.75, 1.0])
    axes.grid(visible=False)
    label(axes, "Where the time went", "share of the time from the first training to the last", "")
    _activities(axes, names)
    return picture


def _bars(axes: Axes, row: int, spans: Sequence[Span], start: float, end: float) -> None:
    for name in sorted({span.name for span in spans}):
        parts = within(union((s.start, s.end) for s in spans if s.name == name), start, end)
        axes.broken_barh(
            [(a - start, b - a) for a, b in parts],
            (row - 0.31, 0.62),
            color=_colour(name),
            linewidth=0,
        )


def _activities(axes: Axes, names: Sequence[str]) -> None:
    """The legend, beside the bars: nothing lies under it."""
    if names:
        axes.legend(
            handles=[Patch(color=_colour(name), label=_named(name)) for name in names],
            loc="center left",
            bbox_to_anchor=(1.0, 0.5),
            fontsize=8,
            frameon=False,
            handlelength=1.0,
        )


def _in_order(activities: set[str]) -> list[str]:
    """Those with a colour of their own first."""
    known = [name for name in _COLOUR_OF if name in activities]
    return [*known, *sorted(activities - set(known))]


def _colour(activity: str) -> str:
    return _COLOUR_OF.get(activity, COLOURS[6])


def _named(activity: str) -> str:
    return "nothing recorded" if activity == "other" else activity.replace("_", " ")
