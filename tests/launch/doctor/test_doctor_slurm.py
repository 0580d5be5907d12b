"""What Slurm's commands say, and what the doctor makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from llamarl_hpc.launch.doctor import slurm
from llamarl_hpc.launch.queue import Answer, Run

LIST = "MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\n"
LIST += "specific pmix plugin versions available: pmix_v4\n"
OLD_LIST = "srun: MPI types are...\nsrun: cray_shasta\nsrun: none\nsrun: pmi2\n"
MPICH, OPEN_MPI = "MPICH Version: 5.0.2", "Open MPI v4.1.4, package: Debian"


def says(stdout: str = "", stderr: str = "", code: int = 0) -> Run:
    def run(argv: Sequence[str]) -> Answer:
        return Answer(returncode=code, stdout=stdout, stderr=stderr)

    return run


def test_commands_that_are_missing_are_named() -> None:
    which = {"sbatch", "srun", "squeue", "scancel", "scontrol"}
    assert slurm.check_commands(lambda n: n if n in which else None).verdict == "ok"
    finding = slurm.check_commands(lambda n: n if n == "srun" else None)
    assert finding.verdict == "fail"
    assert "there is no sbatch, no squeue, no scancel, no scontrol on PATH" in finding.sentence


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (says("slurm 22.05.8\n"), "ok"),
        (says("slurm-wlm 25.05.0-1\n"), "ok"),
        (says("slurm 19.05.5\n"), "fail"),
        (says(stderr="sinfo: fatal: no configuration", code=1), "fail"),
    ],
)
def test_a_slurm_that_is_too_old_or_dumb_is_named(answer: Run, verdict: str) -> None:
    assert slurm.check_version(answer).verdict == verdict


def test_a_controller_that_does_not_answer_is_named() -> None:
    assert slurm.check_controller(says("Slurmctld(primary) at a is UP")).verdict == "ok"
    down = slurm.check_controller(says("Slurmctld(primary) at a is DOWN", code=1))
    assert down.verdict == "fail" and "is DOWN" in down.sentence


def test_only_backfill_starts_heterogeneous_jobs() -> None:
    assert slurm.check_scheduler(says("SchedulerType  = sched/backfill\n")).verdict == "ok"
    finding = slurm.check_scheduler(says("SchedulerType           = sched/builtin\n"))
    assert finding.verdict == "fail" and "resources.job" in finding.advice
    assert slurm.check_scheduler(says(stderr="denied", code=1)).verdict == "warn"


@pytest.mark.parametrize(
    ("text", "flavours"),
    [
        (LIST, {"pmix", "none", "pmi2", "pmix_v4"}),
        (OLD_LIST, {"cray_shasta", "none", "pmi2"}),
        ("MPI plugin types are...\n\tcray_shasta, none, pmi2, pmix\n", None),
        ("srun: fatal: Could not establish a configuration source", set()),
    ],
)
def test_flavours_are_read_from_every_kind_of_list(text: str, flavours: set[str] | None) -> None:
    expected = {"cray_shasta", "none", "pmi2", "pmix"} if flavours is None else flavours
    assert slurm.mpi_flavours(text) == expected


@pytest.mark.parametrize(
    ("flag", "library", "listed", "verdict", "words"),
    [
        ("pmi2", MPICH, LIST, "ok", "--mpi=pmi2 fits MPICH"),
        ("pmix", OPEN_MPI, LIST, "ok", "fits Open MPI"),
        ("pmix_v4", OPEN_MPI, LIST, "ok", "fits Open MPI"),
        ("pmix", MPICH, LIST, "warn", "set launch.mpi to pmi2"),
        ("pmi2", OPEN_MPI, LIST, "warn", "set launch.mpi to pmix"),
        ("none", "CRAY MPICH version 8.1", OLD_LIST, "warn", "set launch.mpi to cray_shasta"),
        ("pmix", OPEN_MPI, OLD_LIST, "fail", "srun has no --mpi=pmix (it has cray_shasta, none"),
        ("pmix", "Unheard-of MPI", LIST, "ok", "fits"),
        (None, MPICH, LIST, "ok", "srun's own default"),
        ("pmi2", MPICH, "srun: fatal: x", "fail", "says srun: fatal: x"),
    ],
)
def test_the_flag_must_exist_and_fit_the_library(
    flag: str | None, library: str, listed: str, verdict: str, words: str
) -> None:
    finding = slurm.check_mpi_flag(flag, library, says(listed))
    assert (finding.verdict, words in finding.text) == (verdict, True), finding.text


def test_what_sbatch_would_refuse_is_said_before() -> None:
    good = says(stderr="sbatch: Job 10 to start at 2026-12-01T03:57:07 using 4 processors")
    assert slurm.check_dry_run(Path("x"), good).sentence.startswith("Job 10 to start")
    bad = says(stderr="sbatch: error: invalid partition specified: gpu", code=1)
    finding = slurm.check_dry_run(Path("x"), bad)
    assert finding.verdict == "fail" and "invalid partition specified: gpu" in finding.sentence


def test_a_slurm_that_does_not_run_is_asked_no_further() -> None:
    names = [f.name for f in slurm.login_checks(says(code=1), heterogeneous=True)]
    assert names == ["slurm_commands", "slurm_version"]
