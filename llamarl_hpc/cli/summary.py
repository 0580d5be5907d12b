"""The closing table of a run: what was learnt, how sure that is, and where everything lies."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from analysis.lineage import Attempt, current_events
from analysis.statistics import wilson_interval
from llamarl_hpc.observability.json_lines import read_json_lines
from llamarl_hpc.run_dir import RunDir


def print_summary(run: RunDir) -> None:
    """Held-out accuracy at the start and at the end, and the paths to go on with."""
    lines = read_json_lines(run.metrics)
    evaluations = evaluations_of(run, lines)
    steps = [line for line in lines if "step" in line]
    console = Console()
    if evaluations:
        console.print(_accuracy_table(evaluations))
    if steps:
        for name, value in _where(run, steps):
            console.out(f"{name:<12}{value}", highlight=False)  # paths are never cut


def evaluations_of(run: RunDir, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Evaluations that count after resumes: each policy version once."""
    attempts = [Attempt.from_info(entry) for entry in run.read_info().get("attempts", [])]
    return current_events(lines, attempts, "eval")


def _accuracy_table(evaluations: list[dict[str, Any]]) -> Table:
    table = Table(title="held-out accuracy", title_justify="left")
    for name in ("policy version", "right", "accuracy", "95 % interval", "change"):
        table.add_column(name, justify="right")
    first = _accuracy(evaluations[0])
    for line in evaluations:
        total = int(line["eval/heldout/num_prompts"])
        correct = line["eval/heldout/num_correct"]
        low, high = wilson_interval(correct, total)
        change = 100 * (_accuracy(line) - first)
        table.add_row(
            str(line["policy_version"]),
            f"{correct:.0f} of {total}",
            f"{_accuracy(line):.3f}",
            f"{low:.3f} - {high:.3f}",
            "" if line is evaluations[0] else f"{change:+.1f} points",
        )
    return table


def _accuracy(line: dict[str, Any]) -> float:
    return float(line["eval/heldout/num_correct"]) / int(line["eval/heldout/num_prompts"])


def _where(run: RunDir, steps: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    newest = max(run.checkpoints.glob("step_*/COMPLETE"), default=None)
    argument = shlex.quote(str(run.path))
    seconds = median(line.get("time/step", 0.0) for line in steps)
    yield "steps", f"{steps[-1]['step'] + 1}, {seconds:.1f} s each (median)"
    yield "run folder", f"{run.path}"
    yield "rollouts", f"{run.rollouts}  (llamarl-hpc rollouts show {argument})"
    yield "metrics", f"{run.metrics}"
    if newest is not None:
        yield "checkpoint", f"{newest.parent}"
    yield "report", f"llamarl-hpc report {argument}"
