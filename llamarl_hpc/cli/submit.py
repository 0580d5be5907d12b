"""`llamarl-hpc submit`: a run as one Slurm job."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llamarl_hpc.cli.announce import announce
from llamarl_hpc.cli.run import Overrides

if TYPE_CHECKING:
    from llamarl_hpc.config.schema import Config
    from llamarl_hpc.launch.run_job import RunJob
    from llamarl_hpc.run_dir import RunDir


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("submit")(submit)


def submit(
    config: Annotated[Path, typer.Argument(help="YAML file, or the folder of a run to continue.")],
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Make the run folder here.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print batch script and resolved config; do nothing.")
    ] = False,
    script: Annotated[
        Path | None,
        typer.Option("--script", help="Write a batch script to submit by hand; do nothing else."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the job's end; its exit code is ours.")
    ] = False,
    site: Annotated[
        str | None, typer.Option("--site", help="Site profile: --set launch.site=NAME.")
    ] = None,
    preflight: Annotated[
        bool,
        typer.Option("--preflight", help="Look at the nodes first: --set launch.preflight=true."),
    ] = False,
) -> None:
    """Submit a run to Slurm: one job, with a component for each executor."""
    from llamarl_hpc.config.load import load_config
    from llamarl_hpc.launch.local import changed_config
    from llamarl_hpc.run_dir import RunDir

    given = [*(overrides or []), *([f"launch.site={site}"] if site else [])]
    given += ["launch.preflight=true"] if preflight else []
    run = RunDir.open(config) if config.is_dir() else None
    settings = load_config(config, given) if run is None else changed_config(run, given)
    changes = given if run is not None else []  # a new config has them inside
    folder = _folder(settings, run, run_dir)
    if script is not None:
        _write_script(settings, script)
    elif dry_run:
        _show(settings, folder, changes)
    else:
        job = _submit(settings, run, folder, run_dir, changes)
        if wait:
            _wait(job)


def _folder(config: Config, run: RunDir | None, run_dir: Path | None) -> Path:
    """Of the run; RUN stands for the id that a new run will get."""
    if run is not None:
        return run.path
    return (run_dir or Path(config.runs_dir) / config.name / "RUN").absolute()


def _write_script(config: Config, path: Path) -> None:
    from llamarl_hpc.launch.submit import script_by_hand
    from llamarl_hpc.storage.atomic import write_text

    write_text(path, script_by_hand(config, str(path)))
    typer.echo(f"written: {path}")


def _show(config: Config, folder: Path, changes: list[str]) -> None:
    from llamarl_hpc.config.load import resolved_text
    from llamarl_hpc.launch.submit import check_submittable, run_script

    check_submittable(config, folder)
    typer.echo(run_script(config, folder, changes))
    typer.echo("# ---- config.yaml ----")
    typer.echo(resolved_text(config), nl=False)


def _submit(
    config: Config, run: RunDir | None, folder: Path, run_dir: Path | None, changes: list[str]
) -> RunJob:
    from llamarl_hpc.launch.local import prepare
    from llamarl_hpc.launch.new_job import submit_new_run
    from llamarl_hpc.launch.submit import check_submission
    from llamarl_hpc.manage.resume import resume_run

    if run is not None:
        job = resume_run(run, changes)
    else:
        check_submission(config, folder)
        prepared = prepare(config, elsewhere=True)
        typer.echo("\n".join(prepared.prompts.skipped.sentences()))
        run, job = submit_new_run(prepared, run_dir)
    announce(run, config, job)
    return job


def _wait(job: RunJob) -> None:
    """Until the job has ended. Ends this process with the run's own exit code."""
    error = job.exception()
    job.wait_for_slurm()
    attempt = job.attempt() or {}
    if error is not None:
        typer.echo(attempt.get("reason") or _words(error), err=True)
        typer.echo(f"logs:    llamarl-hpc logs {shlex.quote(str(job.run.path))}", err=True)
    typer.echo(f"job {job.job_id}: {job.state}")
    code = 1 if error is not None else 0
    raise typer.Exit(int(attempt.get("exit_code", code)))


def _words(error: BaseException) -> str:
    """What submitit frames with rules, and with advice for those who hold its job object."""
    framed = str(error).split("----------------------\n")
    return framed[1].strip() if len(framed) == 3 else f"{error}"
