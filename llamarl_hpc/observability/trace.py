"""Who did what, when: spans of each executor, as JSON Lines in the run's `trace/` folder.

    trainer:    train, publish_weights, checkpoint, wait
    generator:  generate, load_weights, wait
    reward:     score, wait
    controller: step, evaluate, checkpoint

A span is written when it ends, so a killed process loses the one it was in. Times are Unix
seconds, of one monotonic clock within a process, so that no span is negative or overlaps the next
when the wall clock is set.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamarl_hpc.observability.json_lines import JsonLinesFile, read_json_lines

_HEAD = ("name", "start", "end", "executor", "rank")


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One thing that one executor did."""

    name: str
    start: float  # Unix time, seconds
    end: float
    executor: str
    rank: int = 0
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        return self.end - self.start


class Tracer:
    """Writes the spans of one executor's rank; may be used from several threads."""

    def __init__(self, path: Path, executor: str, *, rank: int = 0) -> None:
        self._file = JsonLinesFile(path)
        self._executor, self._rank = executor, rank
        self._offset = time.time() - time.monotonic()

    @contextmanager
    def span(self, name: str, **args: object) -> Iterator[None]:
        """The body of the `with` is a span, also when it raises."""
        start = self.now()
        try:
            yield
        finally:
            self.record(name, start, self.now(), **args)

    def record(self, name: str, start: float, end: float, **args: object) -> None:
        """A span that was timed elsewhere (Unix times)."""
        head = dict(zip(_HEAD, (name, start, end, self._executor, self._rank), strict=True))
        self._file.append(head | args)

    def now(self) -> float:
        """Unix time by the monotonic clock, for `record`."""
        return self._offset + time.monotonic()

    def close(self) -> None:
        """Idempotent; later spans are left out."""
        self._file.close()


def read_spans(paths: Iterable[Path]) -> list[Span]:
    """The spans of some trace files, by start; lines that are torn or foreign are passed over."""
    spans = []
    for path in paths:
        for row in read_json_lines(path):
            if not all(key in row for key in _HEAD):
                continue
            args = {key: value for key, value in row.items() if key not in _HEAD}
            spans.append(Span(**{key: row[key] for key in _HEAD}, args=args))
    return sorted(spans, key=lambda span: span.start)


def to_chrome_trace(spans: Iterable[Span], *, order: Iterable[str] = ()) -> str:
    """The JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open: a process per executor, a
    thread per rank, microseconds from the first span on. Executors that `order` names come first.
    """
    ordered = sorted(spans, key=lambda span: (span.start, -span.end))
    origin = ordered[0].start if ordered else 0.0
    there = dict.fromkeys(span.executor for span in ordered)
    names = [name for name in order if name in there]
    processes = {name: i for i, name in enumerate(dict.fromkeys([*names, *there]), start=1)}
    events = [event for name, pid in processes.items() for event in _process(name, pid)]
    events += [
        {
            "ph": "X",
            "name": span.name,
            "cat": span.executor.partition(".")[0],
            "ts": round((span.start - origin) * 1e6, 3),
            "dur": round(max(span.duration_s, 0.0) * 1e6, 3),
            "pid": processes[span.executor],
            "tid": span.rank,
            "args": span.args,
        }
        for span in ordered
    ]
    return json.dumps(
        {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"start": origin}}
    )


def _process(name: str, pid: int) -> list[dict[str, Any]]:
    """Its name, and its place from the top."""
    head = {"ph": "M", "pid": pid, "tid": 0}
    return [
        head | {"name": "process_name", "args": {"name": name}},
        head | {"name": "process_sort_index", "args": {"sort_index": pid}},
    ]
