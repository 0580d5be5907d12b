"""`llamarl-hpc rollouts diff RUN_A RUN_B`: what differs between two runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table


def diff(
    run_a: Annotated[Path, typer.Argument(help="Folder of a run.")],
    run_b: Annotated[Path, typer.Argument(help="Folder of another.")],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures here.")
    ] = None,
) -> None:
    """Configuration, outcome, held-out accuracy, and questions that went better or worse."""
    from rich.console import Console

    from analysis.diff import diff_runs
    from analysis.read_run import Run
    from llamarl_hpc.cli.damage import print_problems
    from llamarl_hpc.cli.figures import write_figures

    runs = [Run.open(run_a), Run.open(run_b)]
    a, b = runs
    figures = a.without_damage(lambda a: b.without_damage(lambda b: diff_runs(a, b)))
    console = Console()
    for name, run in zip("AB", runs, strict=True):
        console.print(f"{name}  {run.dir.path}", markup=False, highlight=False, soft_wrap=True)
        print_problems(console, run)
    for table in _tables(figures):
        console.print(table)
    console.print(_steps(figures["steps"]), highlight=False)
    if json_file is not None:
        write_figures(json_file, figures)


def _tables(figures: dict[str, Any]) -> list[Table]:
    outcome = _pairs("outcome", figures["outcome"])
    for entry in figures["evaluations"]:
        name = f"held-out accuracy, version {entry['policy_version']}"
        outcome.add_row(name, *(_shown(value) for value in entry["accuracy"]))
    found = [_pairs("configuration", figures["config"]), outcome]
    prompts = figures["prompts"]
    title = f"questions: {prompts['in_both']} in both, of {prompts['num'][0]}, {prompts['num'][1]}"
    named: dict[str, list[Any]] = {}
    for entry in prompts["better"] + prompts["worse"]:
        text = _short(entry["question"])
        named[f"{text} ({entry['prompt_id']})" if text in named else text] = entry["reward"]
    if prompts["in_both"]:
        found.append(_pairs(title, {"mean reward": prompts["reward"]} | named))
    return found


def _pairs(title: str, rows: dict[str, list[Any]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in "AB":
        table.add_column(name, justify="right", overflow="fold")
    for name, values in rows.items():
        table.add_row(Text(name), *(Text(_shown(value)) for value in values))
    if not rows:
        table.add_row("equal", "", "")
    return table


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _short(text: str) -> str:
    """The end of a question, where most say what they want."""
    words = " ".join(text.split())
    return words if len(words) <= 60 else "..." + words[-57:]


def _steps(steps: dict[str, Any]) -> str:
    if not steps["in_both"]:
        return "no optimizer step is in both"
    if steps["first_different"] is None:
        return f"the {steps['in_both']} steps that are in both trained the same tokens"
    return (
        f"{steps['equal']} of {steps['in_both']} common steps trained the same tokens; "
        f"the first that did not is step {steps['first_different']}"
    )
