"""Where `resume` continues a run, and what it refuses."""

from __future__ import annotations

import socket
import time

import pytest
from fake_slurm import FakeSlurm
from run_folders import DOWN, MakeRun

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.manage.resume import check_resumable, free_for_here, is_for_slurm, resume_run

CONFIG = "name: x\ndata: {tasks: [{name: chain_sum}]}\ntrainer: {max_steps: 10}\n"
IN_A_JOB = {"SLURM_JOB_ID": "900", "SLURM_JOB_NODELIST": "n1"}
STOPPED = {"job_id": "700", "outcome": "stopped"}


@pytest.mark.parametrize(
    ("environ", "submits"),
    [
        ({}, True),
        (IN_A_JOB, False),  # its own batch script, or a shell of salloc
        (IN_A_JOB | {"SLURM_STEP_ID": "0"}, True),  # a notebook that srun has started
    ],
)
def test_a_run_that_was_a_job_becomes_one_again_unless_we_are_in_it(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], submits: bool
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert is_for_slurm(make_run(jobs=["700"])) is submits
    assert not is_for_slurm(make_run(name="here", attempts=[{}]))
    assert not is_for_slurm(make_run(name="by hand", attempts=[{"job_id": "700"}]))


def test_a_cancelled_run_is_submitted_again_in_its_folder(
    slurm: FakeSlurm, make_run: MakeRun
) -> None:
    run = make_run(jobs=["700"], attempts=[STOPPED], config=CONFIG)
    run.stop_requested.touch()
    slurm.answer("squeue", (0, "700+0|COMPLETED|n1|None\n", ""))
    slurm.answer("sbatch", (0, "701\n", ""))
    job = resume_run(run, ["trainer.max_steps=20"])
    assert job.job_id == "701" and job.run == run
    assert not run.stop_requested.exists()
    assert [entry["id"] for entry in run.read_info()["jobs"]] == ["700", "701"]
    script = job.paths.submission_file.read_text().splitlines()[-1]
    assert f" resume {run.path} " in script and script.endswith("--set trainer.max_steps=20")


@pytest.mark.parametrize(
    ("squeue", "message"),
    [
        ((0, "700+0|RUNNING|n1|None\n", ""), "job 700 of this run is RUNNING"),
        ((0, "700+0|PENDING||Priority\n", ""), "job 700 of this run is PENDING"),
        (DOWN, "does not say whether job 700 goes on"),
    ],
)
def test_a_run_that_goes_on_or_may_go_on_is_not_continued(
    slurm: FakeSlurm, make_run: MakeRun, squeue: tuple[int, str, str], message: str
) -> None:
    run = make_run(jobs=["700"], attempts=[STOPPED], config=CONFIG)
    slurm.answer("squeue", squeue)
    with pytest.raises(ConfigError, match=message):
        resume_run(run)
    with pytest.raises(ConfigError, match=message):
        free_for_here(run)
    assert slurm.calls("sbatch") == []


def test_a_run_that_goes_on_in_a_process_here_is_not_continued(make_run: MakeRun) -> None:
    entry = {"host": socket.gethostname(), "started": time.time()}
    with pytest.raises(ConfigError, match="the run goes on as process"):
        check_resumable(make_run(attempts=[entry], config=CONFIG))


def test_what_is_complete_or_fixed_is_refused(slurm: FakeSlurm, make_run: MakeRun) -> None:
    run = make_run(attempts=[{"outcome": "done"}], config=CONFIG)
    with pytest.raises(ConfigError, match="the run is complete: 10 steps"):
        check_resumable(run)
    with pytest.raises(ConfigError, match="cannot change"):
        check_resumable(run, ["rollout.seed=9"])
    assert check_resumable(run, ["trainer.max_steps=11"]).trainer.max_steps == 11
