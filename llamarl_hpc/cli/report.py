"""`llamarl-hpc report RUN`: the run as one self-contained HTML file, alone or beside another."""

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
        Path | None,
        typer.Option(help="Where to write; default: report.html (compare.html) in the run folder."),
    ] = None,
    compare: Annotated[
        Path | None, typer.Option("--compare", help="Another run: both over one another.")
    ] = None,
) -> None:
    """Curves, flags, timeline, cost, rollouts to look at; works while the run goes on."""
    from analysis.read_run import Run
    from analysis.report import write_report
    from analysis.report_compare import write_comparison
    from llamarl_hpc.launch.usage import usage_text

    opened = Run.open(run)
    if compare is not None:
        typer.echo(write_comparison(opened, Run.open(compare), out))
    else:
        typer.echo(write_report(opened, out, sacct=usage_text(opened.info)))
