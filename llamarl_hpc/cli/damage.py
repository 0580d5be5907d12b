"""What is said about the damaged files of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from analysis.read_run import Run


def print_problems(console: Console, run: Run) -> None:
    """Which files were left out, why, and what can be done."""
    for problem in run.store.problems:
        console.print(f"[yellow]{problem}[/yellow]", highlight=False, soft_wrap=True)
    if run.store.problems:
        hint = f"llamarl-hpc rollouts repair {run.dir.path}"
        console.print(f"what can be saved: {hint}", style="dim", highlight=False, soft_wrap=True)
