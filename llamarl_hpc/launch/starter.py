"""Who starts the executors: srun in a Slurm job that is ours to use, else mpiexec on this machine.

A job is ours in its batch script and in a shell of salloc. A process inside a job step (`srun --pty
bash`, a notebook that Slurm started) is not asked to start further steps: what it has is in use,
they would wait for ever.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from llamarl_hpc.config.schema import Config
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.launch.allocation import allocation
from llamarl_hpc.launch.extra_args import check_extra_args
from llamarl_hpc.launch.srun import Srun, SrunStepLauncher
from llamarl_hpc.launch.steps import MpiExec, MpiStepLauncher
from llamarl_hpc.placement import executor_names, resources_of, role_of
from llamarl_hpc.run_dir import RunDir

Starter = MpiExec | Srun


def find_starter(config: Config, environ: Mapping[str, str]) -> Starter:
    """As `launch.launcher` says. Raises ConfigError when that cannot work here."""
    starter = _find(config, environ)
    check_extra_args(config.launch.extra_args, starter.path)
    return starter


def _find(config: Config, environ: Mapping[str, str]) -> Starter:
    wanted, job = config.launch.launcher, allocation(environ)
    if wanted == "srun" and job is None:
        raise ConfigError(
            "launch.launcher is srun but this is not inside a Slurm job; use 'llamarl-hpc submit', "
            "or salloc first, or set launch.launcher to mpiexec"
        )
    usable = job is not None and not job.in_step and shutil.which("srun") is not None
    if job is not None and (wanted == "srun" or (wanted == "auto" and usable)):
        return Srun.find(config, job)
    _check_one_host(config)
    return MpiExec.find()


def _check_one_host(config: Config) -> None:
    for executor in executor_names(config):
        nodes = resources_of(config, executor).nodes
        if nodes > 1:
            raise ConfigError(
                f"resources.{role_of(executor)}.nodes is {nodes}, but this starts every executor "
                "on this machine; set it to 1, or use 'llamarl-hpc submit'"
            )


def is_one_host(starter: Starter) -> bool:
    """Whether all executors run beside the controller."""
    return not isinstance(starter, Srun) or len(starter.allocation.hosts) == 1


def make_launcher(
    starter: Starter, config: Config, run: RunDir, attempt: int
) -> SrunStepLauncher | MpiStepLauncher:
    """The supervisor's launcher for one attempt."""
    if isinstance(starter, Srun):
        return SrunStepLauncher(config=config, run=run, attempt=attempt, srun=starter)
    return MpiStepLauncher(config=config, run=run, attempt=attempt, mpiexec=starter)
