"""`llamarl-hpc trace RUN --out FILE`: who did what, when, for a trace viewer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("trace")(trace)


def trace(
    run: Annotated[Path, typer.Argument(help="Folder of a run (or the folder above).")],
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write; default: trace.json in RUN.")
    ] = None,
) -> None:
    """Every executor over all attempts, as a file for ui.perfetto.dev or chrome://tracing."""
    from analysis.read_run import Run
    from analysis.trace_file import write_trace
    from llamarl_hpc.errors import ConfigError

    opened = Run.open(run)
    path = out or opened.dir.path / "trace.json"
    try:
        number = write_trace(opened, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another --out") from error
    typer.echo(f"{number} spans -> {path}")
