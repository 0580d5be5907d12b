"""What is said about the damaged files of a run."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from analysis.read_run import Run


def print_problems(console: Console, run: Run) -> None:
    """Which files were left out, why, and what can be done."""
    from rich.text import Text

    for problem in run.store.problems:
        console.print(Text(problem, style="yellow"), soft_wrap=True)
    if run.store.problems:
        hint = f"what can be saved: llamarl-hpc rollouts repair {shlex.quote(str(run.dir.path))}"
        console.print(Text(hint, style="dim"), soft_wrap=True)
