"""The job of a run as a submitit job, across requeues and resubmissions."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm
from submitit.core import utils

from llamarl_hpc.launch import run_job
from llamarl_hpc.launch.run_job import RunJob
from llamarl_hpc.launch.slurm import HetSlurmInfoWatcher
from llamarl_hpc.run_dir import RunDir


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "bin", monkeypatch)
    fake.answer("sacct", (1, "", "Slurm accounting storage is disabled\n"))
    monkeypatch.setattr(RunJob, "watcher", HetSlurmInfoWatcher(delay_s=0))
    monkeypatch.setattr(RunJob, "_results_timeout_s", 0.0)
    return fake


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    (run.path / "slurm").mkdir(parents=True)
    return run


def write(run: RunDir, *attempts: dict[str, Any]) -> RunJob:
    """The run folder as these attempts left it; the handle of its first job."""
    entries = [
        {"number": k + 1, "job_id": "700", "started": time.time(), "reason": "why", **attempt}
        for k, attempt in enumerate(attempts)
    ]
    run.run_json.write_text(json.dumps({"attempts": entries}))
    return RunJob(run.path / "slurm", "700")


def squeue(slurm: FakeSlurm, **states: str) -> None:
    rows = "".join(f"{job[1:]}+0|{state}|n1|None\n" for job, state in states.items())
    slurm.answer("squeue", (0, rows, ""))


def test_a_stopped_attempt_that_is_requeued_is_no_end(slurm: FakeSlurm, run: RunDir) -> None:
    stopped = {"outcome": "stopped", "continued_by": "requeue"}
    squeue(slurm, _700="PENDING")
    job = write(run, stopped)
    assert not job.done(force_check=True) and job.state == "PENDING"
    squeue(slurm, _700="RUNNING")
    again = write(run, stopped, {"outcome": "running"})
    assert not again.done(force_check=True)
    write(run, stopped, {"outcome": "done"})
    assert again.done() and again.result()["number"] == 2


def test_a_requeued_job_that_is_cancelled_while_it_waits_has_ended(
    slurm: FakeSlurm, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue(slurm, _700="CANCELLED")
    job = write(run, {"outcome": "stopped", "continued_by": "requeue"})
    assert not job.done(force_check=True)  # this may be the moment between two starts
    monkeypatch.setattr(run_job, "_REST_S", 0.0)
    assert job.done(force_check=True)
    assert "stopped: why" in str(job.exception())


def test_an_end_that_is_seen_between_two_starts_is_none(slurm: FakeSlurm, run: RunDir) -> None:
    stopped = {"outcome": "stopped", "continued_by": "requeue"}
    squeue(slurm, _700="NODE_FAIL")
    job = write(run, stopped)
    assert not job.done(force_check=True)
    squeue(slurm, _700="PENDING")
    assert not job.done(force_check=True) and job.state == "PENDING"


def test_a_resubmission_is_followed_to_its_end(slurm: FakeSlurm, run: RunDir) -> None:
    first = {"outcome": "stopped", "continued_by": "resubmission:710"}
    squeue(slurm, _700="COMPLETED", _710="PENDING")
    job = write(run, first)
    assert not job.done(force_check=True) and job.state == "PENDING"
    assert job.attempt() == run.read_info()["attempts"][0]
    second = {"job_id": "710", "outcome": "failed", "continued_by": "resubmission:720"}
    squeue(slurm, _700="COMPLETED", _710="FAILED", _720="RUNNING")
    write(run, first, second)
    assert not job.done(force_check=True) and job.component_states == {"0": "RUNNING"}
    write(run, first, second, {"job_id": "720", "outcome": "done"})
    assert job.done() and job.result()["job_id"] == "720"
    assert job.newest.job_id == "720"


def test_cancelling_reaches_the_job_that_continues_the_run(slurm: FakeSlurm, run: RunDir) -> None:
    squeue(slurm, _710="PENDING")
    job = write(run, {"outcome": "stopped", "continued_by": "resubmission:710"})
    job.cancel()
    assert [call["argv"] for call in slurm.calls("scancel")] == [["710"]]
    assert run.stop_requested.exists()


def test_a_handle_from_another_process_knows_as_much(slurm: FakeSlurm, run: RunDir) -> None:
    squeue(slurm, _700="COMPLETED")
    write(run, {"outcome": "done"})
    for _ in range(2):  # attached by folder and id alone
        assert RunJob(run.path / "slurm", "700").result()["outcome"] == "done"


def test_a_controller_that_left_no_word_is_an_error_with_its_output(
    slurm: FakeSlurm, run: RunDir
) -> None:
    squeue(slurm, _700="NODE_FAIL")
    (run.path / "slurm" / "700_0_log.err").write_text("slurmstepd: error: node n1 is gone\n")
    job = write(run, {"outcome": "running"})
    with pytest.raises(utils.FailedJobError, match="NODE_FAIL") as caught:
        job.result()
    assert "node n1 is gone" in str(caught.value)
