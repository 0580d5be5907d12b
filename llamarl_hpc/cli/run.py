"""`llamarl-hpc run` and `llamarl-hpc resume`: a run on this machine, from config to table."""

from __future__ import annotations

import contextlib
import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llamarl_hpc.cli.status import RunArgument

if TYPE_CHECKING:
    from llamarl_hpc.launch.local import Prepared
    from llamarl_hpc.run_dir import RunDir

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a key, e.g. --set trainer.max_steps=10. Repeatable."),
]
Plain = Annotated[bool, typer.Option("--plain", help="Plain lines instead of the live display.")]
Requeue = Annotated[
    bool,
    typer.Option(
        "--requeue",
        help="In a batch script: what can be continued is, by Slurm, as launch.requeue says.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add both commands to the app."""
    app.command("run")(run)
    app.command("resume")(resume)


def run(
    config: Annotated[Path, typer.Argument(help="YAML file, e.g. experiments/quickstart.yaml")],
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Make the run folder here.")
    ] = None,
    plain: Plain = False,
    requeue: Requeue = False,
) -> None:
    """Start a run here. Ctrl-C stops cleanly and says how to go on."""
    _outlive_early_signals(requeue)
    from llamarl_hpc.config.load import load_config
    from llamarl_hpc.launch.local import create_run, prepare
    from llamarl_hpc.observability.progress import show_if_possible

    prepared = prepare(load_config(config, overrides or []))
    folder = create_run(prepared, run_dir)
    lines = [f"run folder: {folder.path}", *prepared.prompts.skipped.sentences()]
    show_if_possible(lambda: typer.echo("\n".join(lines)))
    _attempt(folder, prepared, plain, requeue)


def resume(
    run: RunArgument,
    overrides: Overrides = None,
    plain: Plain = False,
    here: Annotated[
        bool, typer.Option("--here", help="On this machine, also where the run was a Slurm job.")
    ] = False,
    requeue: Requeue = False,
) -> None:
    """Continue a run from its newest valid checkpoint, as the next attempt in the same folder: as a
    Slurm job where it was one, else here."""
    _outlive_early_signals(requeue)
    from llamarl_hpc.launch.local import changed_config, is_complete, prepare
    from llamarl_hpc.manage.find import find_run
    from llamarl_hpc.manage.resume import (
        complete_sentence,
        free_for_here,
        is_for_slurm,
        resume_run,
    )

    folder = find_run(run)
    config = changed_config(folder, overrides or [])
    if is_complete(folder, config):
        typer.echo(complete_sentence(config))
    elif is_for_slurm(folder) and not here:
        from llamarl_hpc.cli.announce import announce

        announce(folder, config, resume_run(folder, overrides or []))
    else:
        free_for_here(folder)
        _attempt(folder, prepare(config), plain, requeue)


def _outlive_early_signals(requeue: bool) -> None:
    """A batch script that starts must not die of a signal: the run looks at its job's end itself,
    as soon as it can be continued."""
    for number in (signal.SIGTERM, signal.SIGUSR2) if requeue else ():
        signal.signal(number, signal.SIG_IGN)


def _attempt(folder: RunDir, prepared: Prepared, plain: bool, requeue: bool) -> None:
    from llamarl_hpc.cli.summary import print_summary
    from llamarl_hpc.errors import Continued, ExecutorFailed, StoppedBySignal, StoreError
    from llamarl_hpc.launch.local import run_attempt
    from llamarl_hpc.observability.progress import show_if_possible

    try:
        run_attempt(folder, prepared, force_plain=plain, requeue=requeue)
    except Continued:
        raise
    except (ExecutorFailed, StoppedBySignal, StoreError):
        with contextlib.suppress(OSError):  # the terminal may be gone
            again = f"llamarl-hpc resume {shlex.quote(str(folder.path))}"
            typer.echo(f"continue with: {again}", err=True)
        raise
    finally:
        show_if_possible(lambda: print_summary(folder))
