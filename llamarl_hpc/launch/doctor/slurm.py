"""Slurm and its MPI, judged by what its commands say. Works on a login node.

Pure but for the commands, which the caller runs (`queue.run_command`, or a stub).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from llamarl_hpc.launch.doctor.finding import Finding, fail, ok, warn
from llamarl_hpc.launch.queue import Answer, Run

_NEEDED = ("sbatch", "srun", "squeue", "scancel", "scontrol")
_OLDEST = (20, 11)  # the first with srun --exact and --het-group
_ADVICE_MODULE = "load Slurm's module, or use a login node of the cluster"

# how each MPI library wants to be started, the best first
_WANTS = (
    ("open mpi", ("pmix",)),
    ("cray mpich", ("cray_shasta", "pmi2")),
    ("intel", ("pmi2", "pmix")),
    ("mvapich", ("pmi2",)),
    ("mpich", ("pmi2",)),
)


def has_slurm(which: Callable[[str], str | None] = shutil.which) -> bool:
    """Whether any of Slurm's commands is there."""
    return any(which(name) is not None for name in _NEEDED)


def check_commands(which: Callable[[str], str | None] = shutil.which) -> Finding:
    missing = [name for name in _NEEDED if which(name) is None]
    if missing:
        return fail(
            "slurm_commands", f"there is no {', no '.join(missing)} on PATH", _ADVICE_MODULE
        )
    if which("sacct") is None:
        return ok("slurm_commands", f"{', '.join(_NEEDED)} are there; sacct is not (not needed)")
    return ok("slurm_commands", f"{', '.join(_NEEDED)} and sacct are there")


def check_version(run: Run) -> Finding:
    answer = run(["srun", "--version"])
    found = re.search(r"(\d+)\.(\d+)(\.\S+)?", answer.stdout)
    if answer.returncode or found is None:
        return fail("slurm_version", f"srun does not run: {said(answer)}", _ADVICE_MODULE)
    version = (int(found[1]), int(found[2]))
    if version < _OLDEST:
        return fail(
            "slurm_version",
            f"this is Slurm {found[0]}, but job steps need {_OLDEST[0]}.{_OLDEST[1]} or newer",
            "ask for an update; on one node, launch.launcher: mpiexec works without Slurm",
            version=found[0],
        )
    return ok("slurm_version", f"Slurm {found[0]}", version=found[0])


def check_controller(run: Run) -> Finding:
    """Whether slurmctld answers."""
    answer = run(["scontrol", "ping"])
    if answer.returncode or "UP" not in answer.stdout:
        return fail(
            "slurm_controller",
            f"Slurm's controller does not answer: {said(answer)}",
            "wait, or ask the site; nothing can be submitted now",
        )
    return ok("slurm_controller", " ".join(answer.stdout.split()))


def check_scheduler(run: Run) -> Finding:
    """Whether heterogeneous jobs can ever start here."""
    answer = run(["scontrol", "show", "config"])
    if answer.returncode:
        return warn(
            "het_jobs",
            f"scontrol show config failed: {said(answer)}",
            "whether heterogeneous jobs may run is seen when one is submitted",
        )
    found = re.search(r"^SchedulerType\s*=\s*(\S+)", answer.stdout, re.MULTILINE)
    if found is not None and found[1] != "sched/backfill":
        return fail(
            "het_jobs",
            f"the scheduler is {found[1]}, but only sched/backfill starts heterogeneous jobs",
            "set resources.job, which makes the run an ordinary job",
        )
    return ok("het_jobs", "the scheduler can start heterogeneous jobs")


def check_dry_run(script: Path, run: Run) -> Finding:
    """What Slurm would say to the run's own batch script; nothing is submitted."""
    answer = run(["sbatch", "--test-only", str(script)])
    if answer.returncode:
        return fail(
            "dry_run",
            f"sbatch would refuse the run: {said(answer)}",
            "change resources (llamarl-hpc submit CONFIG --dry-run shows the script)",
        )
    return ok("dry_run", said(answer).removeprefix("sbatch: "))


def check_mpi_flag(flag: str | None, library: str, run: Run) -> Finding:
    """Whether srun has the flavour that is asked for, and mpi4py's MPI can talk to it.

    `flag`: of --mpi, None for the site's default; `library`: first line of the MPI's own version.
    """
    answer = run(["srun", "--mpi=list"])
    known = mpi_flavours(answer.stdout + answer.stderr)
    figures = {"flag": flag, "library": library, "known": sorted(known)}
    if not known:
        return fail("mpi_flag", f"srun --mpi=list says {said(answer)}", _ADVICE_MODULE, **figures)
    listed = ", ".join(sorted(known))
    if flag is None:
        sentence = f"srun's own default is used for {library}; whether it fits is seen in a job"
        return ok("mpi_flag", sentence, **figures)
    if flag not in known:
        return fail(
            "mpi_flag",
            f"srun has no --mpi={flag} (it has {listed})",
            f"set launch.mpi to {_best(library, known)}",
            **figures,
        )
    wanted = _wanted(library)
    if wanted and not flag.startswith(wanted):
        return warn(  # an MPI may be built otherwise; in a job two ranks are started for real
            "mpi_flag",
            f"--mpi={flag} does not usually start {library}",
            f"set launch.mpi to {_best(library, known)}",
            **figures,
        )
    return ok("mpi_flag", f"--mpi={flag} fits {library}", **figures)


def mpi_flavours(text: str) -> set[str]:
    """The flavours in the answer of `srun --mpi=list`: one a line, or several with commas."""
    found: set[str] = set()
    for line in text.splitlines():
        words = line.removeprefix("srun:").partition("available:")[2] or line
        names = words.removeprefix("srun:").replace(",", " ").split()
        if len(names) == 1 or "," in words or words is not line:
            found |= {name for name in names if re.fullmatch(r"[a-z]\w+", name)}
    return found


def _wanted(library: str) -> tuple[str, ...]:
    names = library.lower()
    return next((flags for name, flags in _WANTS if name in names), ())


def _best(library: str, known: Collection[str]) -> str:
    """The flavour to recommend."""
    fitting = [flag for flag in _wanted(library) if flag in known]
    return fitting[0] if fitting else f"one that {library} knows"


def said(answer: Answer) -> str:
    """The words of a command, on one line."""
    return " ".join((answer.stderr or answer.stdout).split()) or f"nothing ({answer.returncode})"


def login_checks(run: Run, *, heterogeneous: bool) -> Iterator[Finding]:
    """Everything about Slurm itself that needs no config."""
    yield check_commands()
    version = check_version(run)
    yield version
    if version.verdict == "fail":
        return
    yield check_controller(run)
    if heterogeneous:
        yield check_scheduler(run)
