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


def to_chrome_trace(spans: Iterable[Span]) -> str:
    """The JSON that Perfetto and chrome://tracing open: one process per executor."""
    events: list[dict[str, Any]] = []
    processes: dict[str, int] = {}
    for span in spans:
        if span.executor not in processes:
            processes[span.executor] = len(processes) + 1
            name = {"name": span.executor}
            pid = processes[span.executor]
            events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": name})
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "ts": span.start * 1e6,
                "dur": span.duration_s * 1e6,
                "pid": processes[span.executor],
                "tid": span.rank,
                "args": span.args,
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
