"""`llamarl-hpc report RUN`: the run as one self-contained HTML file, alone or beside another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llamarl_hpc.errors import ConfigError


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
    try:
        if compare is not None:
            typer.echo(write_comparison(opened, Run.open(compare), out))
        else:
            typer.echo(write_report(opened, out, sacct=usage_text(opened.info)))
    except OSError as error:
        where = out or opened.dir.path
        raise ConfigError(
            f"cannot write {where}: {error.strerror}; choose another --out"
        ) from error
