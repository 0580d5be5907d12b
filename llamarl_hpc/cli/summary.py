"""The closing table of a run: what was learnt, how sure that is, and where everything lies."""

from __future__ import annotations

import json
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from analysis.statistics import wilson_interval
from llamarl_hpc.run_dir import RunDir


def read_lines(run: RunDir) -> list[dict[str, Any]]:
    """metrics.jsonl; a last line that is being written is left out."""
    lines = []
    if run.metrics.exists():
        for text in run.metrics.read_text().splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                continue
    return lines


def print_summary(run: RunDir) -> None:
    """Held-out accuracy at the start and at the end, and the paths to go on with."""
    lines = read_lines(run)
    evaluations = [line for line in lines if line.get("event") == "eval"]
    steps = [line for line in lines if "step" in line]
    console = Console()
    if evaluations:
        console.print(_accuracy_table(evaluations))
    if steps:
        console.print(_where(run, steps))


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


def _where(run: RunDir, steps: list[dict[str, Any]]) -> Table:
    table = Table.grid(padding=(0, 2))
    newest = max(run.checkpoints.glob("step_*/COMPLETE"), default=None)
    seconds = median(line.get("time/step", 0.0) for line in steps)
    table.add_row("steps", f"{steps[-1]['step'] + 1}, {seconds:.1f} s each (median)")
    table.add_row("run folder", str(run.path))
    table.add_row("rollouts", f"{run.rollouts}  (llamarl-hpc rollouts show {run.path})")
    table.add_row("metrics", str(run.metrics))
    if newest is not None:
        table.add_row("checkpoint", str(newest.parent))
    table.add_row("report", f"llamarl-hpc report {run.path}")
    return table
