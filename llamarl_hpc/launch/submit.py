"""A run as a Slurm job: its batch script is the controller, which starts the executors' steps.

    config -> components (request.py) -> script (script.py) -> sbatch (slurm.py) -> RunJob

The script continues the run folder that was made before (`llamarl-hpc resume RUN`), so submitting
the same script again, by hand too, goes on where the run stopped.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llamarl_hpc.config.schema import Config
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.launch.extra_args import check_extra_args
from llamarl_hpc.launch.partitions import check_partitions
from llamarl_hpc.launch.request import components_of
from llamarl_hpc.launch.run_job import RunJob
from llamarl_hpc.launch.script import BatchScript, job_name, render
from llamarl_hpc.launch.site import check_limits
from llamarl_hpc.launch.slurm import HetSlurmExecutor, het_script
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.storage.atomic import write_json

_COMMENT = (
    "One run of llamarl-hpc. This script becomes the controller (exec), on the first node of",
    "component 0; it starts one job step per executor: srun --het-group=... Before the time",
    "limit it finishes its step, writes a checkpoint and goes on later (launch.requeue).",
)
_COMMENT_ONE = (
    "One run of llamarl-hpc. This script becomes the controller (exec), on the first node; it",
    "starts one job step per executor, which share the nodes. Before the time limit it finishes",
    "its step, writes a checkpoint and goes on later (launch.requeue).",
)
_BY_HAND = (
    "",
    "  sbatch {file} CONFIG RUN_DIR",
    "",
    "with llamarl-hpc on your PATH. The same RUN_DIR again continues the run. The options below",
    "are what the resources of CONFIG say; written by",
    "  llamarl-hpc submit CONFIG --script {file}",
)
_BY_HAND_SETUP = (
    "config=${1:?which configuration? sbatch SCRIPT CONFIG RUN_DIR}",
    "run=${2:?which run folder? sbatch SCRIPT CONFIG RUN_DIR}",
    'if [ -e "$run/config.yaml" ]; then set -- resume "$run"',
    'else set -- run "$config" --run-dir "$run"; fi',
)


# ------------------------------------------------------------------ scripts


def run_script(config: Config, run: Path, overrides: Sequence[str] = ()) -> str:
    """The batch script of a run whose folder is `run`; `overrides` are what `--set` changes in its
    config. Raises ConfigError."""
    command = shlex.join(_command(run, overrides))
    return render(het_script(str(run / "slurm"), components_of(config), command, **_parts(config)))


def script_by_hand(config: Config, file: str) -> str:
    """A batch script for `sbatch FILE CONFIG RUN_DIR`, without submitit. Raises ConfigError."""
    parts = _parts(config)
    options = het_script("", components_of(config), "", **parts).job
    names = {"output": "%x-%j.log"}
    return render(
        BatchScript(
            job={k: names.get(k, v) for k, v in options.items() if k != "error"},
            components=components_of(config),
            command='llamarl-hpc "$@" --plain --requeue',
            comment=[*parts["comment"], *(line.format(file=file) for line in _BY_HAND)],
            setup=[*parts["setup"], *_BY_HAND_SETUP],
        )
    )


def _parts(config: Config) -> dict[str, Any]:
    one = config.resources.job is not None
    return {
        # the job outlives a node that it can do without; what that means is for the run to say
        "job": {"job-name": job_name(config.name), "no-kill": None},
        "signal_delay_s": config.launch.signal_delay_s,
        "requeue": config.launch.requeue != "never",
        "setup": [*config.launch.modules, *config.launch.setup],
        "comment": _COMMENT_ONE if one else _COMMENT,
    }


def _command(run: Path, overrides: Sequence[str]) -> Sequence[str]:
    changes = [word for text in overrides for word in ("--set", text)]
    python = [sys.executable, "-u", "-m", "llamarl_hpc.cli.main"]
    return [*python, "resume", str(run), "--plain", "--requeue", *changes]


# ------------------------------------------------------------------ submitting


def check_submission(config: Config, folder: Path) -> None:
    """All that can be known before a run folder is made: that there is Slurm here, and that it
    would take, and start, this job. Raises ConfigError."""
    check_slurm_here()
    check_submittable(config, folder)
    check_extra_args(config.launch.extra_args, "srun")
    check_partitions(config)


def check_submittable(config: Config, folder: Path) -> None:
    """Raise ConfigError for what Slurm could not be given, before a run folder exists."""
    check_limits(config)
    run_script(config, folder)
    if "%" in str(folder):
        raise ConfigError(
            f"the run folder {folder} has a percent sign, which Slurm and submitit replace in "
            "names of files; choose another runs_dir, or --run-dir"
        )
    if config.launch.launcher == "mpiexec":
        raise ConfigError(
            "launch.launcher is mpiexec, which would start everything on one node of the job; set "
            "it to auto"
        )


def check_slurm_here() -> None:
    """Raise ConfigError where nothing can be submitted."""
    missing = [name for name in ("sbatch", "srun") if shutil.which(name) is None]
    if missing:
        raise ConfigError(
            f"there is no {' and no '.join(missing)} on PATH; submit from a login node of the "
            "cluster (--dry-run and --script work anywhere)"
        )


def submit_run(run: RunDir, config: Config, overrides: Sequence[str] = ()) -> RunJob:
    """Submit the next attempt of a run; run.json remembers the job. `config` is the run's with
    `overrides`, which the attempt itself puts into its config.yaml. Raises ConfigError."""
    parts = _parts(config)
    executor = _RunExecutor(run.path / "slurm", components_of(config), **parts)
    job = executor.submit_command(_command(run.path, overrides))
    entry = {"id": job.job_id, "cluster": job.cluster, "submitted": time.time()}
    info = run.read_info()
    write_json(run.run_json, {**info, "jobs": [*info.get("jobs", []), entry]})
    assert isinstance(job, RunJob)
    return job


class _RunExecutor(HetSlurmExecutor):
    job_class = RunJob
