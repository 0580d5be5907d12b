"""Continue a run: here, or as a job where it was one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.launch.allocation import allocation
from llamarl_hpc.launch.local import changed_config, is_complete
from llamarl_hpc.manage.jobs import active_jobs, has_slurm, jobs_of
from llamarl_hpc.manage.process import is_running_here
from llamarl_hpc.run_dir import RunDir

if TYPE_CHECKING:
    from llamarl_hpc.config.schema import Config
    from llamarl_hpc.launch.run_job import RunJob


def is_for_slurm(run: RunDir) -> bool:
    """Whether `resume` is to submit a job: the run was one, and we are not where it is to run."""
    return any(job.is_ours for job in jobs_of(run)) and not _is_in_batch_script()


def _is_in_batch_script() -> bool:
    """Or in a shell of salloc: what holds nodes for job steps."""
    job = allocation(os.environ)
    return job is not None and not job.in_step


def free_for_here(run: RunDir) -> None:
    """Before an attempt on this machine: raises ConfigError when the run goes on or a job of it
    waits. Forgets that the run was cancelled. A batch script does neither: it may be that job."""
    if _is_in_batch_script():
        return
    if has_slurm():  # else the folder may be a copy; a controller that runs holds its lock
        check_idle(run)
    run.stop_requested.unlink(missing_ok=True)


def check_resumable(run: RunDir, overrides: Sequence[str] = ()) -> Config:
    """The config of the next attempt. Raises ConfigError when the run goes on, waits in the queue,
    is complete, or `overrides` (KEY=VALUE) change what is fixed."""
    config = changed_config(run, overrides)
    if is_complete(run, config):
        raise ConfigError(complete_sentence(config))
    check_idle(run)
    return config


def complete_sentence(config: Config) -> str:
    """What is said of a run that has nothing left to do."""
    return (
        f"the run is complete: {config.trainer.max_steps} steps; to go on, add "
        "--set trainer.max_steps=NUMBER with a larger one"
    )


def check_idle(run: RunDir) -> None:
    """Raise ConfigError when the run goes on, or a job of it waits."""
    for job, view in active_jobs(run):
        raise ConfigError(
            f"job {job.job_id} of this run is {view.state}; wait for its end, or end it with "
            f"'llamarl-hpc cancel {run.path}'"
        )
    if attempt := is_running_here(run):
        raise ConfigError(
            f"the run goes on as process {attempt['pid']} on {attempt['host']}; wait for its end, "
            f"or end it with 'llamarl-hpc cancel {run.path}'"
        )


def resume_run(run: RunDir, overrides: Sequence[str] = ()) -> RunJob:
    """Submit the next attempt as a Slurm job. Raises ConfigError."""
    from llamarl_hpc.launch.checkpoint_time import check_resumed_run
    from llamarl_hpc.launch.submit import check_submission, submit_run

    config = check_resumable(run, overrides)
    check_submission(config, run.path)
    check_resumed_run(config, run)
    run.stop_requested.unlink(missing_ok=True)
    return submit_run(run, config, overrides)
