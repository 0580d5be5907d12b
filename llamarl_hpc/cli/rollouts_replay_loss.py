"""`llamarl-hpc rollouts replay-loss RUN`: the loss of stored steps, computed once more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamarl_hpc.cli.figures import write_figures
from llamarl_hpc.cli.narrow import narrow_table

if TYPE_CHECKING:
    from rich.table import Table

    from analysis.read_run import Run

RunArgument = Annotated[Path, typer.Argument(help="Folder of a run (or the folder above).")]
_MAX_ROWS = 12  # of the table, at its beginning and at its end


def replay_loss(
    run: RunArgument,
    step: Annotated[
        list[int] | None, typer.Option("--step", help="Optimizer step; default: all.")
    ] = None,
    tolerance: Annotated[float, typer.Option(help="Largest difference of the loss.")] = 1e-5,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures here.")
    ] = None,
) -> None:
    """Compute the loss of stored steps again and compare; exit code 1 when it is not as logged."""
    from rich.console import Console

    from analysis.accounting import listed
    from analysis.read_run import Run
    from analysis.step_batch import trained_steps

    opened = Run.open(run)
    logged = {row["step"]: row for row in opened.metric_rows()}
    steps = step if step else [s for s in trained_steps(opened) if s in logged]
    rows = list(_replayed(opened, steps, logged))
    worst = max((row["difference"] for row in rows), default=0.0)
    odd = [row["step"] for row in rows if not row["difference"] <= tolerance]
    console = Console()
    console.print(_loss_table(rows))
    if json_file is not None:
        write_figures(
            json_file, {"run": str(opened.dir.path), "tolerance": tolerance} | {"steps": rows}
        )
    if odd or not rows:
        text = (
            f"the loss of step{'s' * (len(odd) > 1)} {listed(odd)} is not what was logged"
            if odd
            else "no step is stored"
        )
        console.print(f"[red]wrong:[/red] {text}", highlight=False)
        raise typer.Exit(1)
    console.print(
        f"[green]equal:[/green] {len(rows)} steps, largest difference {worst:.1e}", highlight=False
    )


def _replayed(run: Run, steps: Iterable[int], logged: dict[int, Any]) -> Iterator[dict[str, Any]]:
    import math

    from analysis.step_batch import stored_step
    from llamarl_hpc.config.load import load_config
    from llamarl_hpc.errors import ConfigError
    from llamarl_hpc.training.replay import advantages_again, replay_loss

    config = load_config(run.dir.config)
    for step in steps:
        if step not in logged:
            raise ConfigError(
                f"{run.dir.metrics} has no figures of step {step}; it has {len(logged)} steps, "
                f"from {min(logged, default=0)} to {max(logged, default=0)}"
            )
        stored = stored_step(run, step)
        sums = replay_loss(stored.batch, stored.logprobs, stored.entropy, config)
        again = advantages_again(stored.batch, stored.rewards, stored.truncated, config)
        loss = float(logged[step].get("loss", math.nan))
        figures = sums.metrics()
        yield {
            "step": step,
            "loss": loss,
            "replayed": figures["loss"],
            "difference": abs(figures["loss"] - loss),
            "tokens": int(figures["tokens/trained"]),
            "tokens_logged": int(logged[step].get("tokens/trained", -1)),
            "advantage_difference": float(abs(again - stored.batch.advantages).max()),
        }


def _loss_table(rows: Sequence[dict[str, Any]]) -> Table:
    names = ("step", "tokens", "logged", "replayed", "difference", "advantages")
    table = narrow_table("loss, logged and from the store", names)
    left_out = range(_MAX_ROWS, len(rows) - _MAX_ROWS)
    for index, row in enumerate(rows):
        if index in left_out:
            if index == left_out[0]:
                table.add_row("...")
            continue
        table.add_row(
            str(row["step"]),
            str(row["tokens"]),
            f"{row['loss']:+.8f}",
            f"{row['replayed']:+.8f}",
            f"{row['difference']:.1e}",
            f"{row['advantage_difference']:.1e}",
        )
    return table
