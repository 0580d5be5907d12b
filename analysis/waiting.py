"""Who waited for whom: the idle time of each executor, put down to those who worked meanwhile.

No executor knows whom it waits for: it waits for the controller's next message. But while the
trainer has nothing to do, generators write the batch it needs; while they have nothing to do, the
trainer makes the weights that admit the next prompts, or the slowest replica is not done.
"""

from __future__ import annotations

from collections.abc import Sequence

from analysis.timeline import Interval, busy, executors, intersection, seconds, union, within
from llamarl_hpc.observability.trace import Span

CONTROLLER = "controller"  # nobody else worked: messages on their way, start, evaluation's end
# The first of these that works is waited for; `generator` stands for other replicas, too.
_ORDER = {
    "trainer": ("generator", "reward", "reference"),
    "generator": ("trainer", "reward", "reference", "generator"),
    "reward": ("generator", "trainer", "reference"),
    "reference": ("generator", "trainer", "reward"),
}


def waits(spans: Sequence[Span], start: float, end: float) -> dict[str, dict[str, list[Interval]]]:
    """executor -> role it waited for -> disjoint intervals, between `start` and `end`."""
    working = {name: within(busy(spans, name), start, end) for name in executors(spans)}
    found: dict[str, dict[str, list[Interval]]] = {}
    for name in working:
        idle = gaps(working[name], start, end)
        parts: dict[str, list[Interval]] = {}
        for role in _ORDER.get(_role(name), ()):
            others = [i for n, w in working.items() if n != name and _role(n) == role for i in w]
            parts[role] = intersection(idle, union(others))
            idle = _minus(idle, parts[role])
        parts[CONTROLLER] = idle
        found[name] = {whom: intervals for whom, intervals in parts.items() if intervals}
    return found


def wait_seconds(spans: Sequence[Span]) -> dict[str, dict[str, float]]:
    """executor -> role -> seconds, from the first training to the last; empty without training."""
    trained = [span for span in spans if span.name == "train"]
    if not trained:
        return {}
    start, end = min(s.start for s in trained), max(s.end for s in trained)
    return {
        name: {whom: seconds(intervals) for whom, intervals in parts.items()}
        for name, parts in waits(spans, start, end).items()
    }


def gaps(intervals: Sequence[Interval], start: float, end: float) -> list[Interval]:
    """What disjoint, ordered intervals leave of start..end."""
    found, at = [], start
    for a, b in intervals:
        if a > at:
            found.append((at, a))
        at = max(at, b)
    if at < end:
        found.append((at, end))
    return found


def _minus(intervals: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    return [
        piece for start, end in intervals for piece in gaps(within(taken, start, end), start, end)
    ]


def _role(executor: str) -> str:
    return executor.partition(".")[0]
