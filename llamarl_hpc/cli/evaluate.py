"""`llamarl-hpc eval CONFIG`: accuracy of a model folder on the config's held-out questions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llamarl_hpc.cli.figures import write_figures


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("eval")(evaluate)


def evaluate(
    config: Annotated[Path, typer.Argument(help="YAML file, or the config.yaml of a run.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a key, e.g. --set evaluation.num_generations=8."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Hugging Face folder to measure, e.g. an export."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures to this file.")
    ] = None,
) -> None:
    """avg@k and pass@k (k = evaluation.num_generations) with a 95 % interval, in this process."""
    from rich.console import Console
    from rich.table import Table

    from analysis.statistics import wilson_interval
    from llamarl_hpc.config.load import load_config
    from llamarl_hpc.launch.evaluate import evaluate_model

    extra = [f"model.path={model}"] if model is not None else []
    figures = evaluate_model(load_config(config, [*(overrides or []), *extra]))
    low, high = wilson_interval(figures["num_correct"], int(figures["num_prompts"]))
    figures |= {"low": low, "high": high}
    table = Table(title=f"held-out accuracy of {figures['model']}", title_justify="left")
    k = figures["k"]
    for name in ("questions", f"avg@{k}", f"pass@{k}", "95 % interval", "mean length", "tokens/s"):
        table.add_column(name, justify="right")
    table.add_row(
        f"{figures['num_prompts']}",
        f"{figures['avg']:.3f}",
        f"{figures['pass']:.3f}",
        f"{low:.3f} - {high:.3f}",
        f"{figures['mean_length']:.1f}",
        f"{figures['tokens_per_second']:.0f}",
    )
    Console().print(table)
    if json_file is not None:
        write_figures(json_file, figures)
