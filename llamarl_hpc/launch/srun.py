"""Job steps of the Slurm job around us: one srun, one MPI world, per executor.

In a heterogeneous job an executor runs on its component (`--het-group`). In an ordinary one the
executors share the nodes, and which ones each gets is decided here (`packing.py`). Every size is
an argument, and what Slurm left in the environment is taken away: srun would take it for options.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llamarl_hpc.config.schema import Config, ResourceConfig
from llamarl_hpc.controller.supervisor import StepCommand
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.launch.allocation import Allocation, inside_allocation
from llamarl_hpc.launch.packing import Packing, pack
from llamarl_hpc.launch.request import component_block, component_of, gpu_option, roles_of
from llamarl_hpc.launch.steps import (
    MpiExec,
    Probe,
    in_container,
    python_words,
    rank_arguments,
    step_environment,
)
from llamarl_hpc.placement import ONE_HOST, executor_names, resources_of, role_of
from llamarl_hpc.run_dir import RunDir

_TIMEOUT_S = 60.0
_PMI_OF = {"openmpi": "pmix", "hydra": "pmi2"}  # by flavour of the mpiexec beside mpi4py's MPI


@dataclass(frozen=True, kw_only=True)
class Srun:
    """An srun program and the job in which it starts steps."""

    path: str
    allocation: Allocation
    mpi: str | None  # value of --mpi; None leaves it to the site
    packing: Packing | None  # None in a heterogeneous job

    @classmethod
    def find(cls, config: Config, allocation: Allocation) -> Srun:
        """Raises ConfigError when there is no srun, or the job's shape is not the config's."""
        path = shutil.which("srun")
        if path is None:
            raise ConfigError(
                "launch.launcher is srun but there is no srun on PATH; run inside a Slurm job, or "
                "set launch.launcher to mpiexec"
            )
        return cls(
            path=path,
            allocation=allocation,
            mpi=mpi_flag(config.launch.mpi, path),
            packing=plan(config, allocation, gpus_per_node=_gpus_per_node(config, os.environ)),
        )


def plan(config: Config, allocation: Allocation, *, gpus_per_node: int) -> Packing | None:
    """Nodes of each executor in an ordinary job; None in a heterogeneous one, where Slurm chooses
    within the component. Raises ConfigError when the job has another shape than the config."""
    if not allocation.is_heterogeneous:
        blocks = {name: resources_of(config, name) for name in executor_names(config)}
        return pack(blocks, allocation.components[0], gpus_per_node=gpus_per_node)
    found = [len(component.nodes) for component in allocation.components]
    roles = roles_of(config)
    if len(found) != len(roles):
        raise ConfigError(
            f"the heterogeneous job has {len(found)} components but this run has {len(roles)} "
            f"({', '.join(roles)}, in this order); 'llamarl-hpc submit --dry-run' shows the script"
        )
    for role, nodes in zip(roles, found, strict=True):
        wanted = getattr(config.resources, role).nodes
        if nodes < wanted:
            raise ConfigError(
                f"component {roles.index(role)} of the job has {nodes} node(s) but "
                f"resources.{role}.nodes is {wanted}; submit it again with this configuration"
            )
    return None


def _gpus_per_node(config: Config, environ: Mapping[str, str]) -> int:
    """Of an ordinary job: what the config says it asked for, else what Slurm says we have."""
    if config.resources.job is not None:
        return config.resources.job.gpus_per_node
    return int(environ.get("SLURM_GPUS_ON_NODE", "0"))


def mpi_flag(wanted: str, srun: str) -> str | None:
    """Value of srun's --mpi for `launch.mpi`; None leaves it to the site."""
    if wanted == "default":
        return None
    if wanted != "auto":
        return wanted
    try:
        flag = _PMI_OF[MpiExec.find().flavour]
    except ConfigError:
        return None  # no mpiexec to ask: the site's own MPI, and its default
    return flag if flag in _known_flags(srun) else None


def _known_flags(srun: str) -> set[str]:
    try:
        answer = subprocess.run(
            [srun, "--mpi=list"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{srun} does not run: {error}; load Slurm's module") from error
    return set((answer.stdout + answer.stderr).replace(",", " ").split())


@dataclass(frozen=True, kw_only=True)
class SrunStepLauncher:
    """Knows how to start any executor of one attempt as a job step (a `Launcher`)."""

    config: Config
    run: RunDir
    attempt: int
    srun: Srun

    def command(self, executor: str, instance: int) -> StepCommand:
        """Start all ranks of one executor. `instance` counts its starts within the attempt."""
        packing = self.srun.packing
        crowded = packing is not None and executor in packing.crowded
        return self._step(
            executor,
            resources_of(self.config, executor),
            nodes=packing.nodes_of[executor] if packing is not None else None,
            sharing=_CROWDED if crowded else self._own_cores(),
            program=rank_arguments(self.run, executor, self.attempt, instance),
        )

    def probe(self, role: str, program: Sequence[str]) -> Probe:
        """`program` (arguments of Python) as ranks on all nodes of a role."""
        packing = self.srun.packing
        block, nodes = component_block(self.config, role), None
        if packing is not None:
            names = [name for name in packing.nodes_of if role_of(name) == role]
            nodes = sorted({node for name in names for node in packing.nodes_of[name]})
            block = resources_of(self.config, role).model_copy(update={"nodes": len(nodes)})
        is_real = packing is None and block.num_ranks > 1
        if block.num_ranks == 1:
            block = block.model_copy(update={"ntasks_per_node": 2})
        command = self._step(
            role,
            block,
            nodes=nodes,
            sharing=self._own_cores() if is_real else _CROWDED,
            program=program,
        )
        return Probe(command=command, ranks=block.num_ranks, is_real=is_real)

    def _step(
        self,
        name: str,
        block: ResourceConfig,
        *,
        nodes: Sequence[str] | None,
        sharing: Sequence[str],
        program: Sequence[str],
    ) -> StepCommand:
        launch = self.config.launch
        env = step_environment(
            self.config,
            name,
            base=inside_allocation(os.environ),
            as_root=os.geteuid() == 0,
        )
        return StepCommand(
            argv=[
                self.srun.path,
                *(f"--{key}={value}" for key, value in self._options(name, block, nodes).items()),
                *sharing,
                *in_container(self.config, self.run, launch.container.srun_args),
                *launch.extra_args,
                *python_words(self.config, self.run),
                *program,
            ],
            env=env | {ONE_HOST: str(int(len(self.srun.allocation.hosts) == 1))},
            end_with=signal.SIGTERM,
        )

    def _options(
        self, name: str, block: ResourceConfig, nodes: Sequence[str] | None
    ) -> dict[str, str]:
        gpus = gpu_option(block, form="gres" if block.gpu_request == "gres" else "gpus_per_node")
        options = {
            "nodes": str(block.nodes),
            "ntasks": str(block.num_ranks),
            "ntasks-per-node": str(block.ntasks_per_node),
            "cpus-per-task": str(block.cpus_per_task),
            **gpus,
            "mem": "0",  # shares the job's memory; a step else takes all and the next one waits
            "kill-on-bad-exit": "1",
            "wait": "60",
            "job-name": name,
            "export": "ALL",
        }
        if nodes is None:
            options = {"het-group": str(component_of(name))} | options
        else:
            options["nodelist"] = ",".join(nodes)
            options |= {} if gpus else {"gres": "none"}  # or it would take all of the job's
        if gpus and self.config.launch.gpu_bind is not None:
            options["gpu-bind"] = self.config.launch.gpu_bind
        if self.srun.mpi is not None:
            options["mpi"] = self.srun.mpi
        return options

    def _own_cores(self) -> list[str]:
        bind = self.config.launch.cpu_bind
        return ["--exact", *([f"--cpu-bind={bind}"] if bind is not None else []), "--unbuffered"]


# cores that others have too, where the job has fewer than executors want
_CROWDED = ("--overlap", "--overcommit", "--cpu-bind=none", "--unbuffered")
