"""`llamarl-hpc logs RUN`: what the controller and the executors wrote."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Annotated

import typer

from llamarl_hpc.cli.status import RunArgument


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("logs")(logs)


def logs(
    run: RunArgument,
    executor: Annotated[
        str | None,
        typer.Argument(help="trainer, generator (all replicas), generator.1, reward, controller."),
    ] = None,
    attempt: Annotated[
        int | None, typer.Option("--attempt", help="Of this attempt, not of the newest.")
    ] = None,
    rank: Annotated[int | None, typer.Option("--rank", help="Of this rank alone.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run has ended, or Ctrl-C.")
    ] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Last lines of each.")] = 20,
) -> None:
    """Show the last lines of logs, and with --follow what is added to them."""
    from llamarl_hpc.manage.find import find_run
    from llamarl_hpc.manage.logs import follow_logs

    found = follow_logs(find_run(run), executor, attempt, rank=rank, lines=lines, follow=follow)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            for line in found:
                sys.stdout.write(f"{line}\n")
                sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough; nor may the interpreter's end complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
