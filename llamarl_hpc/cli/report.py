"""`llamarl-hpc report RUN`: the run as one self-contained HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("report")(report)


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run (or the folder above).")],
    out: Annotated[
        Path | None, typer.Option(help="Where to write; default: report.html in the run folder.")
    ] = None,
) -> None:
    """Curves, staleness, timeline and rollouts to look at; works while the run goes on."""
    from analysis.read_run import Run
    from analysis.report import write_report

    typer.echo(write_report(Run.open(run), out))
