"""From what a person types to a run folder, and the jobs of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm
from run_folders import DOWN, MakeRun

from llamarl_hpc.errors import ConfigError, RunDirError
from llamarl_hpc.manage.find import find_run
from llamarl_hpc.manage.jobs import active_jobs, jobs_of, newest_job


def test_a_run_is_found_by_its_folder_and_by_the_one_above(make_run: MakeRun) -> None:
    run = make_run()
    assert find_run(run.path) == find_run(str(run.path)) == find_run(run.path.parent) == run


@pytest.mark.parametrize("text", ["700", "700+0", "700+1", "700.batch"])
def test_a_run_is_found_by_its_job(slurm: FakeSlurm, make_run: MakeRun, text: str) -> None:
    run = make_run(jobs=["700"], name="it's a=b run")
    record = "JobId=700 HetJobId=700 HetJobOffset=0 JobName=x\n   JobState=RUNNING\n"
    slurm.answer("scontrol", (0, f"{record}   StdOut={run.path}/slurm/700_0_log.out\n", ""))
    assert find_run(text) == run


def test_a_component_that_the_job_has_not_is_said(
    slurm: FakeSlurm, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(jobs=["700"])
    monkeypatch.chdir(run.path.parent)
    with pytest.raises(RunDirError) as caught:
        find_run("700+7")
    has = "it has 700+0 (trainer), 700+1 (generator (2 replicas))"
    assert str(caught.value) == f"job 700 has no component 7; {has}"
    by_hand = make_run(attempts=[{"job_id": "702"}], name="by-hand")  # nobody knows its shape
    assert find_run("702+7") == by_hand


def test_what_slurm_has_forgotten_is_looked_for_below_the_current_folder(
    slurm: FakeSlurm, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(jobs=["700"])
    by_hand = make_run(attempts=[{"job_id": "702"}], name="by-hand")
    (make_run(name="damaged").run_json).write_text("{")
    monkeypatch.chdir(run.path.parent)
    assert find_run("700") == run and find_run("702") == by_hand


@pytest.mark.parametrize("quote", ["", "'"])  # Slurm writes no quotes, today
def test_accounting_knows_which_script_was_submitted(
    slurm: FakeSlurm,
    make_run: MakeRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quote: str,
) -> None:
    run = make_run(name="a /b")
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    line = f"sbatch --parsable {quote}{run.path}/slurm/.submission_file_1.sh{quote}\n"
    slurm.answer("sacct", (0, f"sbatch: it's odd\n{line}", ""))
    assert find_run("700") == run


@pytest.mark.parametrize(
    ("text", "message"),
    [("799", "knows of a run in job 799"), ("700_3", "job of an array"), ("nope", "config.yaml")],
)
def test_what_is_no_run_is_one_sentence(
    slurm: FakeSlurm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunDirError, match=message) as caught:
        find_run(text)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------ jobs


def test_jobs_come_from_submissions_attempts_and_scripts(make_run: MakeRun) -> None:
    run = make_run(jobs=["700"], attempts=[{"job_id": "700"}, {"job_id": "705"}])
    (run.path / "slurm" / "690_submission.sh").touch()  # run.json was written at the same moment
    assert {job.job_id: job.is_ours for job in jobs_of(run)} == {
        "690": True,
        "700": True,
        "705": False,
    }
    info = run.read_info()
    run.run_json.write_text(json.dumps({**info, "jobs": []}))
    assert {job.job_id for job in jobs_of(run)} == {"690", "700", "705"}
    assert newest_job(make_run(name="here", attempts=[{}])) is None


def test_active_jobs_are_those_that_wait_or_run(slurm: FakeSlurm, make_run: MakeRun) -> None:
    run = make_run(jobs=["700", "710"])
    slurm.answer("squeue", (0, "700+0|COMPLETED|n1|None\n710+0|PENDING||Dependency\n", ""))
    ((job, view),) = active_jobs(run)
    assert (job.job_id, view.state) == ("710", "PENDING")


def test_a_silent_slurm_is_not_taken_for_an_end(slurm: FakeSlurm, make_run: MakeRun) -> None:
    slurm.answer("squeue", DOWN)
    with pytest.raises(ConfigError, match="does not say whether job 700 goes on"):
        active_jobs(make_run(jobs=["700"]))


def test_no_slurm_on_this_machine_is_said(no_slurm: None, make_run: MakeRun) -> None:
    with pytest.raises(ConfigError, match="on a login node"):
        active_jobs(make_run(jobs=["700"]))
    assert active_jobs(make_run(name="here")) == []
