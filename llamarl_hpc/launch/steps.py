"""Command lines of job steps: one MPI world per executor, started by mpiexec.

Pure text: nothing is started here. The flavour of mpiexec (Open MPI or MPICH's Hydra) is asked
once, because they spell "do not bind" and "root may run this" differently.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamarl_hpc.config.schema import Config
from llamarl_hpc.controller.supervisor import StepCommand
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.launch.allocation import outside_allocation
from llamarl_hpc.placement import MARKER, device_of, resources_of
from llamarl_hpc.run_dir import RunDir


@dataclass(frozen=True, kw_only=True)
class MpiExec:
    """An mpiexec program and its flavour."""

    path: str
    flavour: str  # "openmpi" or "hydra"

    @classmethod
    def find(cls) -> MpiExec:
        """The mpiexec beside this Python if there is one (a wheel's), else the one on PATH."""
        beside = Path(sys.executable).parent / "mpiexec"
        path = str(beside) if beside.is_file() else shutil.which("mpiexec")
        if path is None:
            raise ConfigError(
                "no mpiexec was found beside this Python or on PATH; load your site's MPI module "
                "or install one into this environment (pip install mpich)"
            )
        try:
            answer = subprocess.run(
                [path, "--version"], capture_output=True, text=True, timeout=30, check=False
            ).stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"{path} does not run: {error}; load another MPI") from error
        open_mpi = "open mpi" in answer.lower() or "openrte" in answer.lower()
        return cls(path=path, flavour="openmpi" if open_mpi else "hydra")

    def argv(self, num_ranks: int, *, as_root: bool) -> list[str]:
        """mpiexec with the flags under which ranks share a laptop's cores politely."""
        if self.flavour == "openmpi":
            root = ["--allow-run-as-root"] if as_root else []
            return [self.path, *root, "--oversubscribe", "--bind-to", "none", "-n", f"{num_ranks}"]
        return [self.path, "-bind-to", "none", "-n", f"{num_ranks}"]


# Left by an MPI that started us; a nested mpiexec would take them for its own.
_OTHER_WORLDS = ("PMI_", "PMIX_", "OMPI_", "MPI_LOCAL")


# glibc hands large blocks back to the kernel at every free and gets them back zeroed, page by
# page; activations come and go by the hundred. Kept, they cost a trainer step 10-20 % less.
_KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 27),
}


# What torch cannot ask of its libraries itself: the same sum wherever an array lies in memory (MKL,
# seen to matter on AMD processors), and the same order in every run (cuBLAS).
_REPEATABLE = {"MKL_CBWR": "AUTO", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def step_environment(
    config: Config, executor: str, *, base: Mapping[str, str], as_root: bool = False
) -> dict[str, str]:
    """The environment of every rank: threads, offline caches, and our marker."""
    threads = str(resources_of(config, executor).cpus_per_task)
    env = {k: v for k, v in base.items() if not k.startswith(_OTHER_WORLDS)}
    env |= {
        MARKER: executor,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",  # compute nodes have no network; a missing file fails at once
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    if config.trainer.deterministic:
        env = _REPEATABLE | env
    if device_of(config, executor) == "cpu":
        env["DS_ACCELERATOR"] = "cpu"
        env["CUDA_VISIBLE_DEVICES"] = ""
        env |= _KEEP_FREED_MEMORY
    if as_root:
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return env | config.launch.env


def rank_arguments(run: RunDir, executor: str, attempt: int, instance: int) -> list[str]:
    """What Python gets for every rank, whoever starts it."""
    return [
        *["-m", "llamarl_hpc.executors.main"],
        f"--run-dir={run.path}",
        f"--executor={executor}",
        f"--attempt={attempt}",
        f"--instance={instance}",
    ]


def python_words(config: Config, run: RunDir) -> list[str]:
    """What starts Python in a rank: this one, or the one in the container (launch.container)."""
    container = config.launch.container
    if container.image is None:
        return [sys.executable]
    return [*in_container(config, run, container.command), container.python]


def in_container(config: Config, run: RunDir, words: Sequence[str]) -> list[str]:
    """`words` of launch.container with the names of the image and the run folder put in."""
    image = config.launch.container.image
    if image is None:
        return []
    return [w.replace("{image}", image).replace("{run_dir}", str(run.path)) for w in words]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A step that looks at the nodes of a role before its executors start."""

    command: StepCommand
    ranks: int  # two at least: alone, a rank cannot notice that MPI does not join it to others
    is_real: bool  # as many ranks as the executors have, bound as theirs are


@dataclass(frozen=True, kw_only=True)
class MpiStepLauncher:
    """Knows how to start any executor of one attempt (the supervisor's `Launcher`)."""

    config: Config
    run: RunDir
    attempt: int
    mpiexec: MpiExec

    def command(self, executor: str, instance: int) -> StepCommand:
        """Start all ranks of one executor. `instance` counts its starts within the attempt."""
        ranks = resources_of(self.config, executor).num_ranks
        program = rank_arguments(self.run, executor, self.attempt, instance)
        return self._step(executor, ranks, program)

    def probe(self, role: str, program: Sequence[str]) -> Probe:
        """`program` (arguments of Python) as ranks of a role."""
        ranks = max(2, resources_of(self.config, role).num_ranks)
        command = self._step(role, ranks, program)
        return Probe(command=command, ranks=ranks, is_real=False)

    def _step(self, executor: str, ranks: int, program: Sequence[str]) -> StepCommand:
        as_root = os.geteuid() == 0
        return StepCommand(
            argv=[
                *self.mpiexec.argv(ranks, as_root=as_root),
                *self.config.launch.extra_args,
                *python_words(self.config, self.run),
                *program,
            ],
            # a Slurm job around us is not ours to start steps in: mpiexec would ask srun for them
            env=step_environment(
                self.config, executor, base=outside_allocation(os.environ), as_root=as_root
            ),
        )
