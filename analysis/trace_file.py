"""All attempts of a run as one trace file: who did what, when, in Perfetto or chrome://tracing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from analysis.read_run import Run
from analysis.timeline import executors
from llamarl_hpc.observability.trace import Span, to_chrome_trace
from llamarl_hpc.storage.atomic import write_text


def trace_spans(run: Run) -> list[Span]:
    """Spans of all executors over all attempts; those of `run` are the attempts themselves."""
    found = []
    for attempt in run.attempts:
        spans = run.spans(attempt.number)
        end = attempt.ended or max([attempt.started, *(span.end for span in spans)])
        outcome = attempt.outcome or "unknown"
        whole = Span(
            name=f"attempt {attempt.number} ({outcome})",
            start=min([attempt.started, *(span.start for span in spans)]),
            end=end,
            executor="run",
            args={"host": attempt.host, "resumed_from_step": attempt.resumed_from_step},
        )
        tagged = [replace(s, args=s.args | {"attempt": attempt.number}) for s in spans]
        found += [whole, *tagged]
    return found


def write_trace(run: Run, path: Path) -> int:
    """Write the file; the number of spans in it."""
    spans = trace_spans(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(
        path,
        to_chrome_trace(
            spans, order=["run", *(n for n in executors(spans) if n != "run"), "controller"]
        ),
    )
    return len(spans)
