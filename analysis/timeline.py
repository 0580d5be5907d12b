"""Who worked when, from the spans of a run: overlap, idle shares, and the bound on both.

Intervals are pairs (start, end) of seconds. Letters: t_gen and t_train are the seconds that
generation (mean over replicas) and training (with handing over the weights) take for one step.
One after the other a step takes t_gen + t_train; overlapped perfectly, max(t_gen, t_train).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from analysis.read_run import Run
from llamarl_hpc.observability.trace import Span

Interval = tuple[float, float]
TRAINING = ("train", "publish_weights")
IDLE = ("wait",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """Means over the steps that no evaluation, checkpoint or restart falls into."""

    num_steps: int  # steps that were averaged
    step_s: float  # from the end of one step's training to the end of the next's
    t_gen: float
    t_train: float
    t_score: float
    both_s: float  # seconds of a step in which generation and training went on at once

    @property
    def bound(self) -> float:
        """Largest possible speed-up of overlapping: (t_gen + t_train) / max(t_gen, t_train)."""
        longest = max(self.t_gen, self.t_train)
        return (self.t_gen + self.t_train) / longest if longest else 1.0

    @property
    def speed_up(self) -> float:
        """Over doing the same work one after the other."""
        return (self.t_gen + self.t_train) / self.step_s if self.step_s else 0.0

    @property
    def share_of_bound(self) -> float:
        return self.speed_up / self.bound


def overlap(run: Run) -> Overlap | None:
    """Over all attempts; None when there are fewer than two training steps in one of them."""
    evaluations = [(e.time - e.seconds, e.time) for e in run.evaluations()]
    steps: list[tuple[float, float, float, float, float]] = []
    for attempt in range(1, run.dir.last_attempt() + 1):
        steps += step_times(run.spans(attempt), evaluations)
    if not steps:
        return None
    means = [sum(column) / len(steps) for column in zip(*steps, strict=True)]
    return Overlap(
        num_steps=len(steps),
        step_s=means[0],
        t_gen=means[1],
        t_train=means[2],
        t_score=means[3],
        both_s=means[4],
    )


def step_times(
    spans: Sequence[Span], disturbances: Iterable[Interval] = ()
) -> list[tuple[float, float, float, float, float]]:
    """(step_s, generation, training, scoring, both) of every undisturbed step of one attempt."""
    ends = sorted(span.end for span in spans if span.name == "train")
    disturbed = union(
        [
            *disturbances,
            *(_interval(span) for span in spans if span.name in ("checkpoint", "evaluate")),
        ]
    )
    generators = sorted({s.executor for s in spans if s.executor.startswith("generator")})
    generating = {
        name: union(_interval(s) for s in spans if s.executor == name and s.name == "generate")
        for name in generators
    }
    any_generating = union(interval for one in generating.values() for interval in one)
    training = union(_interval(s) for s in spans if s.name in TRAINING)
    scoring = union(_interval(s) for s in spans if s.name == "score")
    found = []
    for start, end in pairwise(ends):
        if within(disturbed, start, end):
            continue
        gen = sum(seconds(within(one, start, end)) for one in generating.values())
        in_training = within(training, start, end)
        found.append(
            (
                end - start,
                gen / max(len(generators), 1),
                seconds(in_training),
                seconds(within(scoring, start, end)),
                seconds(intersection(in_training, within(any_generating, start, end))),
            )
        )
    return found


def idle_shares(spans: Sequence[Span]) -> dict[str, float]:
    """For each executor the share of time it did nothing, from the first training to the last."""
    trained = [span for span in spans if span.name == "train"]
    if not trained:
        return {}
    start, end = min(s.start for s in trained), max(s.end for s in trained)
    return {
        executor: 1.0 - seconds(within(busy(spans, executor), start, end)) / (end - start)
        for executor in executors(spans)
        if end > start
    }


def activity_seconds(
    spans: Sequence[Span], start: float, end: float
) -> dict[str, dict[str, float]]:
    """For each executor the seconds between `start` and `end` that it spent on what; the rest of
    them is `other`. Things done at once by several processes count once."""
    found: dict[str, dict[str, float]] = {}
    for executor in executors(spans):
        of_executor = [span for span in spans if span.executor == executor]
        by_name = {
            name: within(union(_interval(s) for s in of_executor if s.name == name), start, end)
            for name in sorted({span.name for span in of_executor})
        }
        known = seconds(union(interval for part in by_name.values() for interval in part))
        found[executor] = {name: seconds(part) for name, part in by_name.items()}
        found[executor]["other"] = max(0.0, end - start - known)
    return found


def executors(spans: Iterable[Span]) -> list[str]:
    """Names in the order in which work flows: generators, reward, trainer; not the controller."""
    order = {"generator": 0, "reward": 1, "trainer": 2}
    names = {span.executor for span in spans} - {"controller"}
    return sorted(names, key=lambda name: (order.get(name.split(".")[0], 9), _natural(name)))


def busy(spans: Iterable[Span], executor: str) -> list[Interval]:
    return union(_interval(s) for s in spans if s.executor == executor and s.name not in IDLE)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same seconds as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Seconds that lie in both; a and b are disjoint and in order."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def within(intervals: Sequence[Interval], start: float, end: float) -> list[Interval]:
    """The part of disjoint, ordered intervals that lies in start..end."""
    first = bisect_right(intervals, start, key=lambda interval: interval[1])
    last = bisect_left(intervals, end, key=lambda interval: interval[0])
    return [(max(a, start), min(b, end)) for a, b in intervals[first:last]]


def seconds(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _interval(span: Span) -> Interval:
    return span.start, span.end


def _natural(name: str) -> tuple[int, str]:
    suffix = name.rpartition(".")[2]
    return (int(suffix), name) if suffix.isdigit() else (0, name)
