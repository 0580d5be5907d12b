"""What `submit` and `resume` say of a job that they have submitted."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from llamarl_hpc.config.schema import Config
    from llamarl_hpc.launch.run_job import RunJob
    from llamarl_hpc.run_dir import RunDir


def announce(run: RunDir, config: Config, job: RunJob) -> None:
    """Say what was submitted, and what to do with it."""
    from llamarl_hpc.launch.request import components_of

    names = ", ".join(part.name for part in components_of(config))
    place = shlex.quote(str(run.path))
    typer.echo(f"run folder: {run.path}")
    typer.echo(f"job {job.job_id}: {names}")
    typer.echo(f"look:    llamarl-hpc status {place}")
    typer.echo(f"follow:  llamarl-hpc logs {place} --follow")
    typer.echo(f"stop:    llamarl-hpc cancel {place}   (with a checkpoint; --now: at once)")
    typer.echo(f"go on:   llamarl-hpc resume {place}")
