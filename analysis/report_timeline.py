"""The timeline of the report: who worked when, and who waited for whom."""

from __future__ import annotations

from collections.abc import Sequence

from analysis import charts
from analysis.charts import Bar, Row
from analysis.report_charts import Chart
from analysis.timeline import busy, executors, idle_shares, within
from analysis.waiting import CONTROLLER, wait_seconds, waits
from llamarl_hpc.observability.trace import Span

WINDOW_STEPS = 6  # steps in the timeline
_SHORTEST = 0.002  # of the window: waits below that are no bar
_NAMED = {"train": "step", "generate": "version", "load_weights": "version"}


def timeline_chart(spans: Sequence[Span]) -> Chart | None:
    """Some steps from the middle of the attempt; None without training."""
    trained = [span for span in spans if span.name == "train"]
    if not trained:
        return None
    middle = max(0, len(trained) // 2 - WINDOW_STEPS // 2)
    shown = trained[middle : middle + WINDOW_STEPS]
    start, end = shown[0].start, shown[-1].end
    idle, waited = idle_shares(spans), waits(spans, start, end)
    rows = [
        Row(
            label=executor,
            bars=[
                *_waits(waited.get(executor, {}), executor, (end - start) * _SHORTEST),
                *_bars(spans, executor, start, end),
            ],
            note=f"{100 * idle[executor]:.0f} % idle" if executor in idle else "",
        )
        for executor in executors(spans)
    ]
    first, last = shown[0].args.get("step"), shown[-1].args.get("step")
    return Chart(
        title="Who worked when, and who waited for whom",
        caption=f"Steps {first} to {last}, from the spans that the executors wrote; numbers are "
        "optimizer steps and policy versions. A thin line is a wait, in the colour of those who "
        "worked meanwhile. Idle shares are of the whole attempt.",
        svg=charts.gantt(rows, start=start, end=end, title="Timeline of the executors"),
    )


def wait_rows(spans: Sequence[Span]) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """(executor, seconds waited, [(for whom, share of the time)]), the longest first."""
    trained = [span for span in spans if span.name == "train"]
    if not trained:
        return []
    whole = max(s.end for s in trained) - min(s.start for s in trained)
    found = []
    for executor, parts in wait_seconds(spans).items():
        order = sorted(parts.items(), key=lambda part: -part[1])
        shares = [
            (_whom(w, executor), f"{100 * s / whole:.0f} %") for w, s in order if s > whole / 200
        ]
        found.append((executor, f"{sum(parts.values()):.1f} s", shares))
    return found


def _whom(role: str, executor: str) -> str:
    own = executor.partition(".")[0]
    if role == CONTROLLER:
        return "nobody who worked"
    if role == own:
        return "a slower replica"
    return {"generator": "the generators"}.get(role, f"the {role}")


def _waits(parts: dict[str, list[tuple[float, float]]], executor: str, least: float) -> list[Bar]:
    return [
        Bar(
            start=a,
            end=b,
            kind=f"w-{role}",
            text=f"waits for {_whom(role, executor)}: {b - a:.2f} s",
            thin=True,
        )
        for role, intervals in parts.items()
        for a, b in intervals
        if b - a >= least
    ]


def _bars(spans: Sequence[Span], executor: str, start: float, end: float) -> list[Bar]:
    """Busy spans of one executor, cut to the window, shortest ones joined."""
    bars = []
    names = {span.name for span in spans if span.executor == executor} - {"wait"}
    for name in sorted(names):
        of_name = [s for s in spans if s.executor == executor and s.name == name]
        numbers = {s.start: s.args.get(_NAMED.get(name, "step")) for s in of_name}
        ends = {s.end: s.args.get(_NAMED.get(name, "step")) for s in of_name}
        for a, b in within(busy(of_name, executor), start, end):
            number = numbers.get(a, ends.get(b))
            text = f"{name.replace('_', ' ')}{'' if number is None else f' {number}'}"
            label = "" if number is None or name == "load_weights" else str(number)
            bars.append(
                Bar(start=a, end=b, kind=f"k-{name}", text=f"{text}: {b - a:.2f} s", label=label)
            )
    return bars
