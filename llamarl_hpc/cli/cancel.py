"""`llamarl-hpc cancel RUN`: end a run, with a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from llamarl_hpc.cli.status import RunArgument


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("cancel")(cancel)


def cancel(
    run: RunArgument,
    now: Annotated[
        bool, typer.Option("--now", help="At once, without a checkpoint of the last steps.")
    ] = False,
    wait_s: Annotated[
        float, typer.Option("--wait", min=0.0, help="Seconds to wait for its end.")
    ] = 600.0,
) -> None:
    """End a run: it finishes its step, writes a checkpoint, and does not continue by itself."""
    from llamarl_hpc.manage.cancel import cancel_run
    from llamarl_hpc.manage.find import find_run

    typer.echo(cancel_run(find_run(run), now=now, wait_s=wait_s, tell=typer.echo))
