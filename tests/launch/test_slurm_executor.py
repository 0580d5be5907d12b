"""The submitit executor against stub programs that answer as odd sites do."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import submitit
from fake_slurm import FakeSlurm
from submitit.core import utils

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.launch import queue
from llamarl_hpc.launch.script import Component
from llamarl_hpc.launch.slurm import (
    HetSlurmExecutor,
    HetSlurmInfoWatcher,
    HetSlurmJob,
    SubmissionError,
)

NO_ACCOUNTING = (1, "", "Slurm accounting storage is disabled\n")
GONE = (1, "", "slurm_load_jobs error: Invalid job id specified\n")
PARTS = [
    Component(name="gpu", options={"partition": "a100", "gres": "gpu:a100:4"}),
    Component(name="cpu", options={"partition": "cpu", "nodes": 2, "exclusive": None}),
]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "bin", monkeypatch)
    fake.answer("sbatch", (0, "700\n", ""))
    fake.answer("sacct", NO_ACCOUNTING)
    monkeypatch.setattr(HetSlurmJob, "watcher", HetSlurmInfoWatcher(delay_s=0))
    return fake


@pytest.fixture
def executor(slurm: FakeSlurm, tmp_path: Path) -> HetSlurmExecutor:
    return HetSlurmExecutor(tmp_path / "logs", PARTS)


def write_result(job: Any, outcome: str, value: Any) -> None:
    utils.cloudpickle_dump((outcome, value), job.paths.result_pickle)


# ------------------------------------------------------------------ submitting


def test_a_function_becomes_a_job_with_one_block_per_component(
    slurm: FakeSlurm, executor: HetSlurmExecutor
) -> None:
    executor.update_parameters(time=90, mem="4G", job_name="demo", qos=None, exclusive=False)
    job = executor.submit(max, 1, 2)
    assert isinstance(job, submitit.Job) and job.job_id == "700"
    text = job.paths.submission_file.read_text()
    folder = executor.folder
    assert text.splitlines()[:-1] == [
        "#!/bin/bash",
        "#SBATCH --job-name=demo",
        f"#SBATCH --output={folder}/%j_0_log.out",
        f"#SBATCH --error={folder}/%j_0_log.err",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=B:USR2@180",
        "#SBATCH --no-requeue",
        "#",
        "# component 0: gpu",
        "#SBATCH --time=0-01:30:00",
        "#SBATCH --mem=4G",
        "#SBATCH --partition=a100",
        "#SBATCH --gres=gpu:a100:4",
        "#",
        "#SBATCH hetjob",
        "# component 1: cpu",
        "#SBATCH --time=0-01:30:00",
        "#SBATCH --mem=4G",
        "#SBATCH --partition=cpu",
        "#SBATCH --nodes=2",
        "#SBATCH --exclusive",
        "",
    ]
    last = text.splitlines()[-1]
    assert last.startswith("exec env SUBMITIT_EXECUTOR=slurm ") and "srun" not in last
    assert job.submission().result() == 2
    assert slurm.calls("sbatch")[0]["argv"][0] == "--parsable"


def test_submitting_from_inside_a_job_hands_nothing_of_it_on(
    slurm: FakeSlurm, executor: HetSlurmExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    inherited = {
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x3",
        "SLURM_CPU_BIND_LIST": "0x3",
        "SLURM_NTASKS": "1",
        "SLURM_JOB_ID": "55",
        "SLURM_MEM_PER_CPU": "4000",
        "SBATCH_MEM_PER_GPU": "10G",
        "SBATCH_PARTITION": "debug",
    }
    for name, value in (inherited | {"SLURM_CONF": "/etc/slurm.conf"}).items():
        monkeypatch.setenv(name, value)
    executor.submit(max, 1, 2)
    (call,) = slurm.calls("sbatch")
    assert sorted(set(call["env"]) & set(inherited)) == []
    assert call["env"]["SLURM_CONF"] == "/etc/slurm.conf"


def test_a_cluster_in_sbatchs_answer_is_asked_and_cancelled_there(
    slurm: FakeSlurm, executor: HetSlurmExecutor
) -> None:
    slurm.answer("sbatch", (0, "Welcome to job 3 land\n123;tiger\n", ""))
    slurm.answer("squeue", (0, "CLUSTER: tiger\n123+0|RUNNING|n1|None\n", ""))
    job = executor.submit(max, 1, 2)
    assert (job.job_id, job.state) == ("123", "RUNNING")
    job.cancel()
    assert slurm.calls("scancel")[0]["argv"] == ["--clusters=tiger", "123"]
    assert "--clusters=tiger" in slurm.calls("squeue")[0]["argv"]


def test_what_sbatch_refuses_is_an_error_of_both_worlds(
    slurm: FakeSlurm, executor: HetSlurmExecutor
) -> None:
    slurm.answer("sbatch", (1, "", "sbatch: error: invalid partition specified: nope\n"))
    with pytest.raises(SubmissionError, match="invalid partition") as caught:
        executor.submit(max, 1, 2)
    assert isinstance(caught.value, ConfigError)
    assert isinstance(caught.value, utils.FailedSubmissionError)


def test_what_cannot_be_sent_is_named_before_anything_is_submitted(
    slurm: FakeSlurm, executor: HetSlurmExecutor, tmp_path: Path
) -> None:
    with (tmp_path / "notes").open("w") as notes:

        def write(number: int, lock: Any) -> None:
            notes.write(f"{number} {lock}")

        with pytest.raises(ConfigError, match=r"write cannot be sent .* because of lock, notes \("):
            executor.submit(write, 1, lock=threading.Lock())
    assert slurm.calls("sbatch") == [] and list((tmp_path / "logs").glob("*.pkl")) == []


def test_a_large_pickle_and_a_start_from_zero_are_told_of(
    slurm: FakeSlurm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    executor = HetSlurmExecutor(tmp_path / "logs", PARTS, requeue=True)
    executor.submit(len, bytes(100 << 20))
    from_zero, large = (record.getMessage() for record in caplog.records)
    assert from_zero.startswith("len has no method 'checkpoint', so after a requeue it begins")
    assert large.startswith("len and what it holds take 100 MiB, which every start reads from")
    caplog.clear()
    HetSlurmExecutor(tmp_path / "logs", PARTS).submit(len, b"")
    assert caplog.records == []


def test_arrays_and_unknown_options_are_refused(executor: HetSlurmExecutor) -> None:
    with pytest.raises(ConfigError, match="job array, which a heterogeneous job cannot be"):
        executor.map_array(max, [1, 2], [3, 4])
    with pytest.raises(ConfigError, match="did you mean 'account'"):
        executor.update_parameters(accounts="x")
    with pytest.raises(ConfigError, match="did you mean 'partition'"):
        HetSlurmExecutor("x", [Component(name="a", options={"partitoin": "x"})])


# ------------------------------------------------------------------ states


def test_components_and_the_whole_job_have_states_without_accounting(
    slurm: FakeSlurm, executor: HetSlurmExecutor
) -> None:
    slurm.answer("squeue", (0, "700+0|RUNNING|n1|None\n700+1|PENDING||Resources\n", ""))
    job = executor.submit(max, 1, 2)
    assert job.state == "RUNNING"
    assert job.component_states == {"gpu": "RUNNING", "cpu": "PENDING"}
    assert job.get_info() == {
        "JobID": "700",
        "State": "RUNNING",
        "NodeList": "n1",
        "Reason": "Resources",
    }
    assert not job.done()


def test_one_dead_component_is_the_jobs_state_and_not_yet_its_end(
    slurm: FakeSlurm, executor: HetSlurmExecutor
) -> None:
    slurm.answer("squeue", (0, "700+0|RUNNING|n1|None\n700+1|CANCELLED|n2|None\n", ""))
    job = executor.submit(max, 1, 2)
    assert job.state == "CANCELLED" and not job.done(force_check=True)


def test_sacct_knows_what_squeue_has_forgotten(
    slurm: FakeSlurm, executor: HetSlurmExecutor
) -> None:
    slurm.answer("squeue", GONE)
    slurm.answer("sacct", (0, "700+0|COMPLETED|n1\n700+1|CANCELLED by 1001|n2\n", ""))
    job = executor.submit(max, 1, 2)
    assert job.component_states == {"gpu": "COMPLETED", "cpu": "CANCELLED"}
    assert job.done(force_check=True)
    (start,) = (a for a in slurm.calls("sacct")[0]["argv"] if a.startswith("--starttime="))
    asked = time.mktime(time.strptime(start.partition("=")[2], "%Y-%m-%dT%H:%M:%S"))
    assert asked < time.time() - 80_000  # also after midnight


def test_a_result_is_read_without_any_word_from_slurm(
    slurm: FakeSlurm, executor: HetSlurmExecutor
) -> None:
    slurm.answer("squeue", (1, "", "Unable to contact slurm controller\n"))
    job = executor.submit(max, 1, 2)
    write_result(job, "success", 42)
    assert job.done() and job.result() == 42


def test_an_exception_of_the_function_arrives_with_its_trace(executor: HetSlurmExecutor) -> None:
    job = executor.submit(max, 1, 2)
    write_result(job, "error", "Traceback: ValueError: broken")
    with pytest.raises(utils.FailedJobError, match="ValueError: broken"):
        job.result()


def test_a_job_that_ended_without_a_result_has_failed(
    slurm: FakeSlurm, executor: HetSlurmExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.answer("squeue", (0, "700+0|OUT_OF_ME+|n1|None\n700+1|COMPLETED|n1|None\n", ""))
    monkeypatch.setattr(HetSlurmJob, "_results_timeout_s", 0.0)
    job = executor.submit(max, 1, 2)
    with pytest.raises(utils.UncompletedJobError, match="OUT_OF_MEMORY"):
        job.result()


def test_waiting_ends_when_nobody_knows_the_job(
    slurm: FakeSlurm, executor: HetSlurmExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.answer("squeue", (0, "", ""))
    monkeypatch.setattr(HetSlurmInfoWatcher, "missing_limit_s", 0.0)
    monkeypatch.setattr(HetSlurmJob, "_results_timeout_s", 0.0)
    job = executor.submit(max, 1, 2)
    job.watcher.update()
    time.sleep(0.01)
    job.watcher.update()
    assert job.state == "LOST" and job.done()
    with pytest.raises(utils.UncompletedJobError, match="accounting storage is disabled"):
        job.result()


def test_commands_that_fail_change_no_state_and_are_told_of_once(
    slurm: FakeSlurm, executor: HetSlurmExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    slurm.answer("squeue", (0, "700+0|RUNNING|n1|None\n", ""), (1, "", "Unable to contact\n"))
    job = executor.submit(max, 1, 2)
    assert job.state == "RUNNING"
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            job.watcher.update()
    assert job.state == "RUNNING"
    assert len([r for r in caplog.records if "Unable to contact" in r.message]) == 1


def test_a_component_that_is_forgotten_first_stays_as_it_was(
    slurm: FakeSlurm, executor: HetSlurmExecutor
) -> None:
    slurm.answer(
        "squeue",
        (0, "700+0|RUNNING|n1|None\n700+1|FAILED|n2|None\n", ""),
        (0, "700+0|RUNNING|n1|None\n", ""),
    )
    job = executor.submit(max, 1, 2)
    for _ in range(3):
        job.watcher.update()
        assert job.component_states == {"gpu": "RUNNING", "cpu": "FAILED"}
    assert job.state == "FAILED" and not job.done()


def test_a_requeued_job_waits_again(slurm: FakeSlurm, executor: HetSlurmExecutor) -> None:
    job = executor.submit(max, 1, 2)
    for state in ("RUNNING", "REQUEUED", "SPECIAL_EXIT", "PENDING", "RUNNING"):
        slurm.answer("squeue", (0, f"700+0|{state}|n1|None\n700+1|{state}|n2|None\n", ""))
        assert job.state == state and not job.done(force_check=True)


def test_a_slurmctld_that_is_down_for_a_while_ends_no_job(
    slurm: FakeSlurm, executor: HetSlurmExecutor
) -> None:
    slurm.answer("squeue", (0, "700+0|RUNNING|n1|None\n700+1|RUNNING|n2|None\n", ""))
    job = executor.submit(max, 1, 2)
    assert job.state == "RUNNING"
    slurm.answer("squeue", (1, "", "Unable to contact slurm controller\n"))
    slurm.answer("sacct", (0, "700+0|FAILED|n1\n700+1|COMPLETED|n2\n", ""))
    for _ in range(3):
        assert job.state == "RUNNING" and not job.done(force_check=True)
    slurm.answer("squeue", (0, "700+0|COMPLETED|n1|None\n700+1|COMPLETED|n2|None\n", ""))
    assert job.done(force_check=True) and job.state == "COMPLETED"


def test_a_job_that_accounting_believes_to_run_for_ever_is_lost(
    slurm: FakeSlurm, executor: HetSlurmExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.answer("squeue", GONE)
    slurm.answer("scontrol", GONE)
    slurm.answer("sacct", (0, "700+0|RUNNING|n1\n700+1|RUNNING|n2\n", ""))
    monkeypatch.setattr(HetSlurmInfoWatcher, "missing_limit_s", 0.0)
    job = executor.submit(max, 1, 2)
    job.watcher.update()
    time.sleep(0.01)
    job.watcher.update()
    assert job.state == "LOST" and job.done()


def test_every_command_of_slurm_is_called_as_if_from_no_job(
    slurm: FakeSlurm, executor: HetSlurmExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["SLURM_JOB_ID", "SLURM_TIME_FORMAT", "SQUEUE_FORMAT", "SQUEUE_PARTITION", "SRUN_MPI"]
    names += ["SACCT_FORMAT", "SCANCEL_INTERACTIVE", "SBATCH_HOLD", "PMI_RANK"]
    for name in names:
        monkeypatch.setenv(name, "55")
    slurm.answer("squeue", GONE)
    job = executor.submit(max, 1, 2)
    job.watcher.update()
    job.cancel()
    for command in ("sbatch", "squeue", "scontrol", "sacct", "scancel"):
        assert slurm.calls(command) != []
        assert not any(name in call["env"] for call in slurm.calls(command) for name in names)


def test_one_forgotten_job_does_not_spoil_the_answer_for_others() -> None:
    def run(argv: Any) -> queue.Answer:
        jobs = argv[-1].removeprefix("--jobs=").split(",")
        if argv[0] == "sacct":
            return queue.Answer(returncode=0, stdout="10|COMPLETED|n1\n", stderr="")
        if "10" in jobs:
            return queue.Answer(returncode=1, stdout="", stderr="Invalid job id specified")
        return queue.Answer(returncode=0, stdout="11|RUNNING|n2|None\n", stderr="")

    report = queue.ask(["10", "11"], since=0.0, run=run)
    assert {job: view.state for job, view in report.views.items()} == {
        "10": "COMPLETED",
        "11": "RUNNING",
    }
    assert report.is_complete and report.failures == []


def test_many_handles_ask_rarely(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.answer("squeue", (0, "".join(f"{k}+0|RUNNING|n1|None\n" for k in range(50)), ""))
    HetSlurmJob.watcher = HetSlurmInfoWatcher(delay_s=30)
    jobs = [HetSlurmJob(tmp_path, f"{k}") for k in range(50)]
    for _ in range(20):
        assert {job.state for job in jobs} == {"RUNNING"}
    assert len(slurm.calls("squeue")) <= 2
