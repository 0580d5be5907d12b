"""Everything that `llamarl-hpc doctor` looks at, and what a run looks at before it starts.

On a login node: Slurm, the folder for runs, the model, and what sbatch would say. In a job, or on a
machine without Slurm: the nodes themselves as well, by a probe for each role (`inside.py`).
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from llamarl_hpc.config.schema import Config
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.launch.allocation import allocation
from llamarl_hpc.launch.checkpoint_time import checkpoint_bytes
from llamarl_hpc.launch.doctor import slurm
from llamarl_hpc.launch.doctor.finding import Finding, as_json, fail, ok, warn
from llamarl_hpc.launch.doctor.folder import check_folder
from llamarl_hpc.launch.doctor.inside import Ground, probe_all
from llamarl_hpc.launch.doctor.probe import versions
from llamarl_hpc.launch.extra_args import check_extra_args
from llamarl_hpc.launch.queue import run_command
from llamarl_hpc.launch.site import check_limits
from llamarl_hpc.launch.srun import mpi_flag
from llamarl_hpc.launch.starter import Starter, find_starter, is_one_host, make_launcher
from llamarl_hpc.models.load import resolve_model
from llamarl_hpc.models.package import PREFIX, find_converted
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.storage.atomic import write_json

log = logging.getLogger(__name__)
_LIBRARY_S = 60.0


def examine(config: Config | None) -> Iterator[Finding]:
    """All findings, one by one. Without a config: only what needs none."""
    wants_none = config is not None and config.launch.launcher == "mpiexec"
    has_slurm, job = slurm.has_slurm() and not wants_none, allocation(os.environ)
    if has_slurm:
        het = config is None or config.resources.job is None
        yield from slurm.login_checks(run_command, heterogeneous=het)
        yield check_mpi(config)
    else:
        yield ok("slurm", "not checked: mpiexec will start the executors, on this machine")
    yield ok("packages", ", ".join(f"{k} {v}" for k, v in versions().items()), **versions())
    if config is None:
        yield from check_folder(Path.cwd(), run_command, needed_bytes=0, shared=has_slurm)
        yield ok("config", "not checked: give a CONFIG to look at model, folder and nodes")
        return
    model, about_model = check_model(config)
    yield about_model
    folder = _existing(Path(config.runs_dir).expanduser())
    yield from _folder(config, folder, model, shared=has_slurm)
    yield from check_site(config)
    if has_slurm and job is None:
        yield check_script(config)
        yield ok(
            "nodes",
            "not checked: this is a login node; run doctor in a job, or submit with --preflight",
        )
        return
    yield from _nodes(config, folder, model)


def preflight(config: Config, run: RunDir, attempt: int, starter: Starter, model: Path) -> None:
    """Look at the nodes of a run that is about to start. Writes preflight.json into the attempt's
    folder and every finding into the log. Raises ConfigError when something fails."""
    start = time.monotonic()
    findings = list(_folder(config, run.path, model, shared=not is_one_host(starter)))
    findings += probe_all(_ground(config, run, starter, model))
    for finding in findings:
        level = {"ok": logging.INFO, "warn": logging.WARNING, "fail": logging.ERROR}
        log.log(level[finding.verdict], "preflight %s: %s", finding.name, finding.text)
    result = as_json(findings, time.monotonic() - start)
    write_json(run.attempt(attempt) / "preflight.json", result)
    broken = [finding.text for finding in findings if finding.verdict == "fail"]
    if broken:
        raise ConfigError("the preflight found what would break the run: " + ". ".join(broken))


# ------------------------------------------------------------------ parts


def check_mpi(config: Config | None) -> Finding:
    """srun's flavours against mpi4py's library, which another process loads."""
    srun, wanted = shutil.which("srun"), "auto" if config is None else config.launch.mpi
    if srun is None:
        return ok("mpi_flag", "not checked: there is no srun on PATH")
    argv = [
        sys.executable,
        "-c",
        "from llamarl_hpc.placement import mpi_library; print(mpi_library())",
    ]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_LIBRARY_S, check=False)
        flag = mpi_flag(wanted, srun)
    except (subprocess.TimeoutExpired, ConfigError) as error:
        return warn("mpi_flag", f"MPI cannot be asked here: {error}", "look again inside a job")
    if done.returncode:
        last = (done.stderr.splitlines() or ["nothing said"])[-1]
        return fail(
            "mpi_flag",
            f"mpi4py does not load its MPI: {last}",
            "load the module of the MPI, or install one into this environment (pip install mpich)",
        )
    return slurm.check_mpi_flag(flag, done.stdout.strip(), run_command)


def check_model(config: Config) -> tuple[Path | None, Finding]:
    """The model's folder, if it is there and whole."""
    path = config.model.path
    try:
        if path.startswith(PREFIX):
            folder = find_converted(path.removeprefix(PREFIX))
            if folder is None:
                sentence = f"{path} is not converted yet; submit does it, on the login node"
                return None, ok("model", sentence)
        folder = resolve_model(path)
    except ConfigError as error:
        return None, fail("model", f"{error}", "")
    return folder, ok("model", f"{folder} is whole, with its tokenizer")


def check_site(config: Config) -> Iterator[Finding]:
    """Known limits of the site, if the config names one."""
    if config.launch.site is None:
        return
    try:
        check_limits(config)
    except ConfigError as error:
        yield fail("site", f"{error}", "")
    else:
        yield ok("site", f"nothing is asked for that {config.launch.site} is known to forbid")


def check_script(config: Config) -> Finding:
    """What sbatch would say to the batch script, and srun to the arguments of its steps."""
    from llamarl_hpc.launch.submit import run_script  # submitit is not needed elsewhere here

    with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
        try:
            check_extra_args(config.launch.extra_args, "srun")
            file.write(run_script(config, Path(config.runs_dir).absolute() / "doctor"))
        except ConfigError as error:
            return fail("dry_run", f"{error}", "")
        file.flush()
        return slurm.check_dry_run(Path(file.name), run_command)


def _folder(config: Config, folder: Path, model: Path | None, *, shared: bool) -> list[Finding]:
    kept = config.trainer.save_total_limit + 1  # the newest is whole before the oldest goes
    needed = kept * (checkpoint_bytes(config, model) if model is not None else 0)
    return list(check_folder(folder, run_command, needed_bytes=needed, shared=shared))


def _nodes(config: Config, folder: Path, model: Path | None) -> Sequence[Finding]:
    try:
        starter = find_starter(config, os.environ)
    except ConfigError as error:
        return [fail("starter", f"{error}", "")]
    with tempfile.TemporaryDirectory(dir=folder, prefix=".doctor-run-") as name:
        return probe_all(_ground(config, RunDir(Path(name)), starter, model))


def _ground(config: Config, run: RunDir, starter: Starter, model: Path | None) -> Ground:
    launcher = make_launcher(starter, config, run, 0)
    return Ground(
        config=config,
        launcher=launcher,
        folder=run.path,
        model_folder=model,
        one_host=is_one_host(starter),
    )


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there: nothing is made."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.is_dir())
