"""Runs on a real Slurm that outlive time limits, preemption, requeues and nodes."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from attempts import JobRun, slurm, start_soon
from cluster import Cluster
from tiny_run import cli, losses_of, write_run_files

from analysis.accounting import accounting
from analysis.read_run import Run
from llamarl_hpc.launch.script import BatchScript, Component, log_file, render
from llamarl_hpc.launch.slurm import HetSlurmExecutor
from llamarl_hpc.run_dir import RunDir

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1800)]  # for a hang

PARTITIONS: dict[str, Any] = {
    "trainer": {"partition": "trainer", "mem": "700M", "time": "60"},
    "generator": {"partition": "generator", "mem": "600M"},
    "reward": {"partition": "reward", "mem": "600M"},
}


def write_files(folder: Path, **changes: Any) -> Path:
    """A slow run (0.2 s for every group that is scored) that asks Slurm often."""
    folder.mkdir(exist_ok=True)
    (folder / "slow").touch()
    launch = {"poll_s": 1.0, "stop_margin_s": 2.0, "signal_delay_s": 1, **changes.pop("launch", {})}
    return write_run_files(
        folder, resources=PARTITIONS, launch=launch, evaluation={"num_prompts": 0}, **changes
    )


def books_are_exact(folder: Path, num_trained: int) -> None:
    books = accounting(Run.open(folder))
    assert books.violations == []
    assert books.in_flight == []
    assert books.num_issued == sum(books.counts.values())
    assert books.counts["trained"] == num_trained
    assert cli("rollouts", "verify", folder).code == 0


def test_a_run_goes_on_over_a_time_limit_and_a_requeue_and_changes_no_loss(
    cluster: Cluster, tmp_path: Path
) -> None:
    config = write_files(tmp_path, trainer={"max_steps": 24, "save_steps": 0})
    run = JobRun.submit(config, tmp_path / "run")

    run.wait_for_step(attempt=1)  # an operator cuts the time limit
    slurm("scontrol", "update", f"jobid={run.job_id}", "endtime=now+25")
    first = run.wait_for_end(attempt=1)
    assert (first["outcome"], first["exit_code"]) == ("stopped", 4), run.said()
    # Slurm's signal before the limit may come first
    assert first["stopped_by"] in ("the time limit", "SIGUSR2"), run.said()
    assert first["reason"].endswith("with a checkpoint")
    run.start_again()

    run.wait_for_step(attempt=2)  # an operator's requeue, right after the other
    slurm("scontrol", "requeue", run.job_id)
    second = run.wait_for_end(attempt=2)
    assert second["reason"].startswith("stopped by requeue after step"), run.said()
    assert second["reason"].endswith("with a checkpoint")  # its ranks were signalled, and went on
    told = (run.folder / "attempts" / "2" / "controller.0.log").read_text()
    assert "launch.signal_delay_s lets Slurm signal only 1 s before the job's end" in told
    (tmp_path / "slow").unlink()
    run.start_again()

    last = run.wait_for_end(attempt=3)
    assert last["outcome"] == "done", run.said()
    assert [a["continued_by"] for a in run.attempts] == ["requeue", "requeue", ""]
    assert [a["started_by"] for a in run.attempts] == ["", "requeue", "requeue"]
    assert {a["job_id"] for a in run.attempts} == {run.job_id}
    books_are_exact(run.folder, num_trained=24 * 4)

    here = tmp_path / "here"
    answer = cli(
        "run", config, "--plain", "--run-dir", here, "--set", "resources={}", timeout_s=600
    )
    assert answer.code == 0, answer.err
    assert losses_of(run.folder) == losses_of(here)


# ------------------------------------------------------------------ without a run

IDLE = Path(__file__).with_name("idle_run.py")


def submit_idle(folder: Path, *options: str) -> JobRun:
    """A heterogeneous job whose controller does nothing until something ends it."""
    run = JobRun(RunDir.create_at(folder).path)
    parts = [
        Component(name=name, options={"partition": name, "time": 5, "mem": "200M"})
        for name in ("trainer", "generator", "reward")
    ]
    job = {"output": log_file(f"{run.folder}/%j_0_log.out"), "no-kill": None}
    command = shlex.join([sys.executable, str(IDLE), str(run.folder)])
    script = folder.with_suffix(".sh")
    script.write_text(render(BatchScript(job=job, components=parts, command=command)))
    job_id = slurm("sbatch", "--parsable", *options, str(script)).strip()
    (run.folder / "run.json").write_text(json.dumps({"attempts": [], "jobs": [{"id": job_id}]}))
    return run


def test_preemption_and_a_lost_node_are_recognised_and_the_job_is_requeued_whole(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = submit_idle(tmp_path / "run", "--requeue")
    run.wait_for_start(attempt=1)
    options = ("--partition=urgent", "--nodelist=node3", "--exclusive", "--output=/dev/null")
    urgent = slurm("sbatch", "--parsable", *options, "--wrap=true")
    first = run.wait_for_end(attempt=1)
    assert (first["stopped_by"], first["continued_by"]) == ("preemption", "requeue"), run.said()
    slurm("scancel", urgent.strip(), check=False)
    run.start_again()

    run.wait_for_start(attempt=2)  # the only node of its component: Slurm requeues a part of it
    cluster.lose_node("node3")
    second = run.wait_for_end(attempt=2)
    assert second["stopped_by"] in ("requeue", "node failure"), run.said()
    assert second["continued_by"] == "requeue"
    cluster.return_node("node3")
    run.start_again()

    run.wait_for_start(attempt=3)
    assert [a["started_by"] for a in run.attempts] == ["", "requeue", "requeue"]
    slurm("scancel", run.job_id)
    third = run.wait_for_end(attempt=3)
    assert third["stopped_by"] == "cancellation" and third["continued_by"] == "", run.said()


def test_where_requeueing_is_refused_a_new_job_continues_until_somebody_cancels_a_part(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = submit_idle(tmp_path / "run of it's own", "--no-requeue")
    first_job = run.job_id
    run.wait_for_start(attempt=1)
    slurm("scontrol", "update", f"jobid={first_job}", "endtime=now+5")
    first = run.wait_for_end(attempt=1)
    assert first["stopped_by"] == "the time limit", run.said()
    run.wait("new job", lambda: run.job_id != first_job)  # a requeue is tried before
    run.wait_for_start(attempt=2)
    assert run.attempts[0]["continued_by"] == f"resubmission:{run.job_id}"
    second = run.attempts[1]
    assert (second["started_by"], second["resumed_from_step"]) == ("resubmission", 1)
    slurm("scancel", f"{run.job_id}+1")
    second = run.wait_for_end(attempt=2)
    assert second["stopped_by"] == "cancellation of component 1 (generator)", run.said()
    assert second["continued_by"] == ""
    run.wait("end of the job", lambda: not run.states() & {"RUNNING", "PENDING", "COMPLETING"})


# ------------------------------------------------------------------ other jobs


class Careful:
    """Says how often it was started; is checkpointed by submitit."""

    def __init__(self) -> None:
        self.starts = 0

    def __call__(self, started: Path) -> int:
        self.starts += 1
        started.touch()
        if self.starts == 1:
            time.sleep(100.0)
        return self.starts

    def checkpoint(self, started: Path) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, started)


def test_a_function_with_a_checkpoint_goes_on_after_a_requeue(
    cluster: Cluster, tmp_path: Path
) -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    parts = [
        Component(name="one", options={"partition": "trainer"}),
        Component(name="two", options={"partition": "generator"}),
    ]
    executor = HetSlurmExecutor(tmp_path / "logs", parts, requeue=True)
    executor.update_parameters(time=5, mem="200M")
    job = executor.submit(Careful(), tmp_path / "started")
    run = JobRun(tmp_path)  # to wait
    run.wait("start", lambda: (tmp_path / "started").exists())
    slurm("scancel", "--batch", "--signal=USR2", job.job_id)

    def is_back() -> bool:
        return set(slurm("squeue", "-ha", "-o%T", f"-j{job.job_id}").split()) == {"PENDING"}

    run.wait("job back in the queue", is_back)
    assert not job.done(force_check=True)
    start_soon(job.job_id)
    assert job.result() == 2
