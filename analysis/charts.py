"""Small charts as inline SVG, drawn for both themes: colours are CSS variables of the page.

Letters in names: S series. All charts share one coordinate frame (`_Frame`), so that they line up
in a grid; text sizes are chosen for 340 to 560 pixels of width. Values that are None or not finite
are gaps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 460, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 12, 34
_LEGEND = 14  # height of a legend above the plot
MAX_POINTS = 300

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line; `colour` is a number 1..5 of the page's palette."""

    points: Sequence[Point]
    colour: int = 1
    label: str = ""
    band: Sequence[tuple[float, float, float]] = ()  # (x, low, high)
    dots: bool = False
    faint: bool = False
    texts: Sequence[str] = ()  # one per point, shown on hovering


@dataclass(frozen=True)
class _Frame:
    """Maps values to pixels."""

    x0: float
    x1: float
    y0: float
    y1: float
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    top: int = _TOP

    def x(self, value: float) -> float:
        share = (value - self.x0) / ((self.x1 - self.x0) or 1.0)
        return round(self.left + share * (self.width - self.left - _RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self.y0) / ((self.y1 - self.y0) or 1.0)
        return round(self.height - _BOTTOM - share * (self.height - self.top - _BOTTOM), 1)


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str = "optimizer step",
    y_range: tuple[float | None, float | None] = (None, None),
    tick: Callable[[float], str] | None = None,
) -> str:
    """Lines over x, each with an optional band; a legend when there are several labels."""
    shown = [_clean(one) for one in series]
    xs = [x for one in shown for x, _ in one.points]
    ys = [y for one in shown for _, y in one.points]
    ys += [edge for one in shown for _, low, high in one.band for edge in (low, high)]
    if not xs:
        return nothing(title)
    low = min(ys) if y_range[0] is None else y_range[0]
    high = max(ys) if y_range[1] is None else y_range[1]
    ticks = nice_ticks(low, high)
    labels = [(one.label, f"f{one.colour}") for one in shown if one.label]
    top = _TOP + (_LEGEND if len(labels) > 1 else 0)
    frame = _Frame(min(xs), max(xs), min(ticks[0], low), max(ticks[-1], high), top=top)
    body = [*_axes(frame, ticks, tick or _number, x_label)]
    for one in shown:
        body += _series(frame, one)
    body += _legend(labels)
    return _svg(body, title)


def stacked_bars(
    bars: Sequence[tuple[str, Sequence[float]]],
    names: Sequence[str],
    *,
    title: str,
    x_label: str,
    first_x: float,
    last_x: float,
) -> str:
    """One bar per entry, its values stacked to shares of 1; `bars` holds (hover text, values)."""
    if not bars:
        return nothing(title)
    frame = _Frame(first_x, last_x, 0.0, 1.0, top=_TOP + (_LEGEND if len(names) > 1 else 0))
    body = [*_axes(frame, [0, 0.25, 0.5, 0.75, 1.0], lambda v: f"{100 * v:.0f} %", x_label)]
    slot = (WIDTH - _LEFT - _RIGHT) / len(bars)
    for index, (text, values) in enumerate(bars):
        total, base = sum(values) or 1.0, 0.0
        for level, value in enumerate(values):
            share = value / total
            top, bottom = frame.y(base + share), frame.y(base)
            if share > 0:
                body.append(
                    f'<rect class="lag{min(level, 4)}" x="{_LEFT + index * slot + 0.5:.1f}" '
                    f'y="{top}" width="{max(slot - 1, 0.8):.1f}" height="{bottom - top:.1f}">'
                    f"<title>{escape(text)}: {escape(names[level])} {100 * share:.0f} %</title>"
                    "</rect>"
                )
            base += share
    body += _legend([(name, f"lag{min(i, 4)}") for i, name in enumerate(names)])
    return _svg(body, title)


def histogram(counts: Sequence[float], edges: Sequence[float], *, title: str, x_label: str) -> str:
    """Bars of equal width between edges, on a logarithmic height (counts span decades)."""
    if not sum(counts):
        return nothing(title)
    heights = [math.log10(1 + count) for count in counts]
    frame = _Frame(edges[0], edges[-1], 0.0, max(heights))
    decades = [d for d in range(1, math.ceil(max(heights)) + 1) if d <= max(heights)]
    body = [*_axes(frame, [float(d) for d in decades], lambda v: _count(10**v), x_label)]
    for count, height, (a, b) in zip(counts, heights, pairwise(edges), strict=True):
        top = frame.y(height)
        body.append(
            f'<rect class="f1" x="{frame.x(a) + 0.5:.1f}" y="{top}" '
            f'width="{max(frame.x(b) - frame.x(a) - 1, 0.5):.1f}" height="{frame.y(0) - top:.1f}">'
            f"<title>{a:.2f} to {b:.2f}: {count:,.0f}</title></rect>"
        )
    return _svg(body, title)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A piece of a timeline row."""

    start: float
    end: float
    kind: str  # CSS class
    text: str  # shown on hovering
    label: str = ""  # inside, where it fits
    thin: bool = False  # a line in the middle of the row


@dataclass(frozen=True, kw_only=True)
class Row:
    label: str
    bars: Sequence[Bar]
    note: str = ""  # at the right end
    marks: Sequence[float] = field(default=())


def gantt(rows: Sequence[Row], *, start: float, end: float, title: str) -> str:
    """Rows of bars over seconds since `start`."""
    width, line, left, right = 960, 34, 104, 86
    height = line * len(rows) + 38
    scale = (width - left - right) / ((end - start) or 1.0)
    body = []
    for value in nice_ticks(0.0, end - start, count=8):
        x = left + value * scale
        if value > end - start:
            continue
        body.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{height - 30}"/>')
        body.append(
            f'<text class="tick" x="{x:.1f}" y="{height - 14}" text-anchor="middle">'
            f"{_number(value)} s</text>"
        )
    for index, row in enumerate(rows):
        y = 6 + index * line
        middle = y + line / 2 - 1
        body.append(
            f'<text class="name" x="{left - 10}" y="{middle:.0f}" text-anchor="end">'
            f"{escape(row.label)}</text>"
        )
        body.append(
            f'<rect class="track" x="{left}" y="{y}" width="{width - left - right}" '
            f'height="{line - 10}"/>'
        )
        for bar in row.bars:
            x, size = left + (bar.start - start) * scale, (bar.end - bar.start) * scale
            top, height_of = (y + (line - 10) / 2 - 2, 4) if bar.thin else (y, line - 10)
            body.append(
                f'<rect class="{bar.kind}" x="{x:.2f}" y="{top:g}" width="{max(size, 0.6):.2f}" '
                f'height="{height_of}"><title>{escape(bar.text)}</title></rect>'
            )
            if bar.label and size > 8 + 7 * len(bar.label):
                body.append(
                    f'<text class="onbar" x="{x + size / 2:.1f}" y="{middle:.0f}" '
                    f'text-anchor="middle">{escape(bar.label)}</text>'
                )
        body.append(
            f'<text class="tick" x="{width - right + 8}" y="{middle:.0f}">{escape(row.note)}</text>'
        )
    return _svg(body, title, width=width, height=height, kind="wide")


def nothing(title: str) -> str:
    """What stands where there is no data yet."""
    middle = f'x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle"'
    return _svg([f'<text class="tick" {middle}>no data yet</text>'], title)


# ---------------------------------------------------------------- values


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` points: means of equally long runs of neighbours."""
    if len(points) <= limit:
        return list(points)
    edges = [round(i * len(points) / limit) for i in range(limit + 1)]
    runs = [points[a:b] for a, b in pairwise(edges)]
    return [(sum(x for x, _ in r) / len(r), sum(y for _, y in r) / len(r)) for r in runs]


def smooth(points: Sequence[Point], window: int) -> list[Point]:
    """Centred moving mean over `window` points."""
    half, found = window // 2, []
    for index, (x, _) in enumerate(points):
        around = points[max(0, index - half) : index + half + 1]
        found.append((x, sum(y for _, y in around) / len(around)))
    return found


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round values that enclose low..high, about `count` steps."""
    if not high > low:
        half = (abs(low) or 1.0) / 2
        low, high = max(low - half, min(low, 0.0)), high + half  # never below 0 without need
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _clean(series: Series) -> Series:
    points = [(x, y) for x, y in series.points if math.isfinite(y)]
    texts = series.texts if len(points) == len(series.points) else ()
    return Series(**(series.__dict__ | {"points": points, "texts": texts}))


def _number(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return _count(value)
    if abs(value) < 0.001:
        return f"{value:.0e}"
    return f"{value:.6g}"


def _count(value: float) -> str:
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


# ---------------------------------------------------------------- SVG


def _svg(
    body: Sequence[str], title: str, *, width: int = WIDTH, height: int = HEIGHT, kind: str = ""
) -> str:
    return (
        f'<svg class="chart {kind}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}">{"".join(body)}</svg>'
    )


def _axes(
    frame: _Frame, ticks: Sequence[float], tick: Callable[[float], str], x_label: str
) -> list[str]:
    right, bottom = frame.width - _RIGHT, frame.height - _BOTTOM
    body = []
    for value in ticks:
        y = frame.y(value)
        kind = "axis" if value == ticks[0] else "grid"
        body.append(f'<line class="{kind}" x1="{frame.left}" x2="{right}" y1="{y}" y2="{y}"/>')
        body.append(
            f'<text class="tick" x="{frame.left - 6}" y="{y + 4}" text-anchor="end">'
            f"{escape(tick(value))}</text>"
        )
    whole = [value for value in nice_ticks(frame.x0, frame.x1) if float(value).is_integer()]
    for value in whole:
        if frame.x0 <= value <= frame.x1:
            body.append(
                f'<text class="tick" x="{frame.x(value)}" y="{bottom + 16}" text-anchor="middle">'
                f"{_number(value)}</text>"
            )
    body.append(
        f'<text class="tick" x="{(frame.left + right) / 2}" y="{frame.height - 3}" '
        f'text-anchor="middle">{escape(x_label)}</text>'
    )
    return body


def _series(frame: _Frame, series: Series) -> list[str]:
    body = []
    if series.band:
        upper = [f"{frame.x(x)},{frame.y(high)}" for x, _, high in series.band]
        lower = [f"{frame.x(x)},{frame.y(low)}" for x, low, _ in reversed(series.band)]
        body.append(f'<polygon class="b{series.colour}" points="{" ".join(upper + lower)}"/>')
    if len(series.points) > 1:
        points = " ".join(f"{frame.x(x)},{frame.y(y)}" for x, y in series.points)
        kind = "faint" if series.faint else "line"
        body.append(f'<polyline class="{kind} s{series.colour}" points="{points}"/>')
    if series.dots or len(series.points) == 1:
        texts = series.texts or [""] * len(series.points)
        for (x, y), text in zip(series.points, texts, strict=True):
            body.append(
                f'<circle class="f{series.colour}" cx="{frame.x(x)}" cy="{frame.y(y)}" r="3.4">'
                f"<title>{escape(text)}</title></circle>"
            )
    return body


def _legend(entries: Sequence[tuple[str, str]]) -> list[str]:
    if len(entries) < 2:
        return []
    body, x = [], float(_LEFT)
    for label, kind in entries:
        body.append(f'<rect class="{kind}" x="{x:.0f}" y="2" width="9" height="9" rx="2"/>')
        body.append(f'<text class="tick" x="{x + 13:.0f}" y="11">{escape(label)}</text>')
        x += 28 + 7.4 * len(label)
    return body
