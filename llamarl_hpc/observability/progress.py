"""What a person sees while a run goes on: a live panel in a terminal, plain lines elsewhere.

The display is fed with snapshots and never asks anybody anything. Plain lines appear once per
optimizer step and for events worth a line, so a batch job's output stays readable.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"  # eighths of a block, low to high
_HISTORY = 60  # steps in the reward sparkline


@dataclass(frozen=True, kw_only=True)
class ExecutorLine:
    """One executor in the panel."""

    name: str
    activity: str  # its own words, from the last heartbeat
    version: int | None  # policy version it holds; None where that means nothing
    waits_for: str = ""
    restarts: int = 0


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One moment of a run. `metrics` are those of the last step, empty before the first. `step` is
    the number of steps made: the last one is called `step - 1`, everywhere (docs/architecture.md).
    """

    phase: str
    step: int
    max_steps: int
    policy_version: int
    elapsed_s: float
    metrics: dict[str, float] = field(default_factory=dict)
    accuracies: list[tuple[int, float]] = field(default_factory=list)  # (version, held-out)
    executors: list[ExecutorLine] = field(default_factory=list)


class Progress(Protocol):
    def step(self, snapshot: Snapshot) -> None:
        """An optimizer step is done."""

    def refresh(self, snapshot: Snapshot) -> None:
        """Some time has passed."""

    def note(self, text: str) -> None:
        """Something worth a line happened."""

    def close(self) -> None:
        """Leave the terminal as it was. Idempotent."""


def make_progress(*, force_plain: bool = False) -> Progress:
    """Live in a terminal, else plain."""
    console = Console()
    if force_plain or not console.is_terminal:
        return SturdyProgress(PlainProgress())
    return SturdyProgress(LiveProgress(console))


def step_line(snapshot: Snapshot) -> str:
    """One step in one line: what was learnt, how fast, how stale, and where the time went."""
    m = snapshot.metrics
    parts = [
        f"step {snapshot.step - 1:>4} ({snapshot.step}/{snapshot.max_steps})",
        f"reward {m.get('reward/mean', 0.0):.3f}",
        f"loss {m.get('loss', 0.0):+.4f}",
        f"staleness {m.get('staleness/mean', 0.0):.1f}",
        f"length {m.get('completions/mean_length', 0.0):.1f}",
        f"{m.get('perf/completion_tokens_per_second', 0.0):.0f} tok/s",
        f"{m.get('time/step', 0.0):.1f} s "
        f"(train {m.get('time/train', 0.0):.1f}, generate {m.get('time/generation', 0.0):.1f}, "
        f"wait {m.get('time/wait_for_batch', 0.0):.1f})",
    ]
    return "  ".join(parts)


class NotesFromLog(logging.Handler):
    """What is worth a warning in the log is worth a line on the display."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        self._progress.note(record.getMessage())


def show_if_possible(show: Callable[[], None]) -> None:
    """Write to standard output; when its reader is gone (a closed terminal, `| head`), it leads
    nowhere from then on."""
    try:
        show()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)


class SturdyProgress:
    """A display whose reader may go away without ending the run."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def step(self, snapshot: Snapshot) -> None:
        show_if_possible(lambda: self._progress.step(snapshot))

    def refresh(self, snapshot: Snapshot) -> None:
        show_if_possible(lambda: self._progress.refresh(snapshot))

    def note(self, text: str) -> None:
        show_if_possible(lambda: self._progress.note(text))

    def close(self) -> None:
        show_if_possible(self._progress.close)


class PlainProgress:
    """Lines on standard output."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def _print(self, text: str) -> None:
        sys.stdout.write(f"[{time.monotonic() - self._start:7.1f} s] {text}\n")
        sys.stdout.flush()

    def step(self, snapshot: Snapshot) -> None:
        self._print(step_line(snapshot))

    def refresh(self, snapshot: Snapshot) -> None:
        """Time alone is not worth a line."""

    def note(self, text: str) -> None:
        self._print(text)

    def close(self) -> None:
        sys.stdout.flush()


class LiveProgress:
    """A panel that is redrawn in place; notes scroll above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rewards: list[float] = []
        self._live = Live(console=console, refresh_per_second=4, transient=False)
        self._live.start()

    def step(self, snapshot: Snapshot) -> None:
        self._rewards = [*self._rewards, snapshot.metrics.get("reward/mean", 0.0)][-_HISTORY:]
        self.refresh(snapshot)

    def refresh(self, snapshot: Snapshot) -> None:
        panel = render(snapshot, self._rewards)
        panel.width = max(self._console.width - 2, 1)  # the "^C" of a terminal fits beside it
        self._live.update(panel)

    def note(self, text: str) -> None:
        self._live.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self._live.stop()


def render(snapshot: Snapshot, rewards: list[float]) -> Panel:
    """The panel of one moment."""
    return Panel(
        Group(_head(snapshot), Text(), _figures(snapshot, rewards), Text(), _executors(snapshot)),
        title=f"[bold]{snapshot.phase}[/]",
        border_style="cyan",
    )


def _head(snapshot: Snapshot) -> Table:
    grid = Table.grid(padding=(0, 2))
    minutes, seconds = divmod(int(snapshot.elapsed_s), 60)
    step_s = snapshot.metrics.get("time/step")
    left = ""
    if step_s:
        left = f"about {step_s * (snapshot.max_steps - snapshot.step) / 60:.0f} min left"
    grid.add_row(
        f"[bold]{snapshot.step} of {snapshot.max_steps} steps[/]",
        ProgressBar(total=snapshot.max_steps, completed=snapshot.step, width=40),
        f"{minutes}:{seconds:02d}",
        left,
    )
    return grid


def _figures(snapshot: Snapshot, rewards: list[float]) -> Table:
    m = snapshot.metrics
    grid = Table.grid(padding=(0, 3))
    grid.add_row(
        f"reward [bold]{m.get('reward/mean', 0.0):.3f}[/]",
        f"staleness {m.get('staleness/mean', 0.0):.1f} (max {m.get('staleness/max', 0.0):.0f})",
        f"{m.get('perf/completion_tokens_per_second', 0.0):.0f} tok/s",
        f"{m.get('time/step', 0.0):.1f} s/step",
        f"length {m.get('completions/mean_length', 0.0):.1f}",
    )
    accuracy = "  ".join(f"v{version}: {value:.3f}" for version, value in snapshot.accuracies[-4:])
    grid.add_row(f"[green]{_sparkline(rewards)}[/]")
    grid.add_row(f"held-out accuracy  {accuracy}" if accuracy else "")
    return grid


def _sparkline(values: list[float]) -> str:
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BARS[round((v - low) / span * (len(_BARS) - 1))] for v in values)


def _executors(snapshot: Snapshot) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("executor", "version", "does", "waits for"):
        table.add_column(title, style="dim" if title == "executor" else "")
    for line in snapshot.executors:
        again = f" [yellow](restarted {line.restarts}x)[/]" if line.restarts else ""
        version = "" if line.version is None or line.version < 0 else f"v{line.version}"
        table.add_row(line.name, version, line.activity + again, line.waits_for)
    return table
