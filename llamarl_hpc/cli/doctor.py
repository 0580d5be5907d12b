"""`llamarl-hpc doctor`: what would break a run here, before it does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llamarl_hpc.cli.figures import write_figures
from llamarl_hpc.cli.run import Overrides

if TYPE_CHECKING:
    from llamarl_hpc.config.schema import Config
    from llamarl_hpc.launch.doctor.finding import Finding

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("doctor")(doctor)


def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="YAML file, or the folder of a run; default: none.")
    ] = None,
    overrides: Overrides = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write all findings to this file.")
    ] = None,
) -> None:
    """Look for what would break a run here: Slurm, MPI, folders, network, GPUs.

    Exit code 0, or 2 when something fails. In a Slurm job the nodes are looked at, too.
    """
    import time

    from llamarl_hpc.launch.doctor.examine import examine
    from llamarl_hpc.launch.doctor.finding import as_json, exit_code

    start = time.monotonic()
    findings = []
    for finding in examine(_load(config, overrides or [])):
        findings.append(finding)
        _show(finding)
    if json_file is not None:
        write_figures(json_file, as_json(findings, time.monotonic() - start))
    raise typer.Exit(exit_code(findings))


def _load(path: Path | None, overrides: list[str]) -> Config | None:
    from llamarl_hpc.config.load import load_config
    from llamarl_hpc.run_dir import RunDir

    if path is None:
        return None
    return load_config(RunDir.open(path).config if path.is_dir() else path, overrides)


def _show(finding: Finding) -> None:
    """A row at once, not a table at the end: some checks take a while."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(width=4)
    table.add_column(width=18)
    table.add_column(overflow="fold")
    told = Text(finding.sentence)
    if finding.advice:
        told.append(f"\n{finding.advice}", style="dim")
    table.add_row(Text(finding.verdict, style=_COLOURS[finding.verdict]), finding.name, told)
    Console(highlight=False).print(table)
