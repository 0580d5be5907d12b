"""Runs on a real Slurm that outlive time limits, preemption, requeues and nodes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from attempts import JobRun, rank_of, slurm
from cluster import Cluster
from tiny_run import cli, losses_of, write_run_files

from analysis.accounting import accounting
from analysis.read_run import Run
from llamarl_hpc.launch.script import Component
from llamarl_hpc.launch.slurm import HetSlurmExecutor

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1800)]  # for a hang

PARTITIONS: dict[str, Any] = {
    "trainer": {"partition": "trainer", "mem": "700M", "time": "5"},
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


def test_a_run_goes_on_over_time_limit_requeue_and_preemption_and_changes_no_loss(
    cluster: Cluster, tmp_path: Path
) -> None:
    config = write_files(tmp_path, trainer={"max_steps": 24, "save_steps": 0})
    run = JobRun.submit(config, tmp_path / "run")

    run.wait_for_step(attempt=1)  # an operator cuts the time limit
    slurm("scontrol", "update", f"jobid={run.job_id}", "endtime=now+20")
    first = run.wait_for_end(attempt=1)
    assert (first["outcome"], first["exit_code"]) == ("stopped", 4), run.said()
    assert first["reason"].startswith("stopped by the time limit after step"), run.said()
    assert first["reason"].endswith("with a checkpoint")
    run.start_again()

    run.wait_for_step(attempt=2)  # an operator's requeue, right after the other
    slurm("scontrol", "requeue", run.job_id)
    second = run.wait_for_end(attempt=2)
    assert second["reason"].startswith("stopped by requeue after step"), run.said()
    run.start_again()

    run.wait_for_step(attempt=3)  # as preemption does: the steps are told, and not the script
    slurm("scancel", "--signal=TERM", run.job_id)
    third = run.wait_for_end(attempt=3)
    assert third["reason"].endswith("with a checkpoint"), run.said()
    (tmp_path / "slow").unlink()
    run.start_again()

    last = run.wait_for_end(attempt=4)
    assert last["outcome"] == "done", run.said()
    assert [a["continued_by"] for a in run.attempts] == ["requeue"] * 3 + [""]
    assert [a["started_by"] for a in run.attempts] == ["", *["requeue"] * 3]
    assert {a["job_id"] for a in run.attempts} == {run.job_id}
    books_are_exact(run.folder, num_trained=24 * 4)

    here = tmp_path / "here"
    answer = cli("run", config, "--plain", "--run-dir", here, "--set", "resources={}")
    assert answer.code == 0, answer.err
    assert losses_of(run.folder) == losses_of(here)


def test_a_killed_srun_a_preempted_job_and_a_lost_node_cost_nothing(
    cluster: Cluster, tmp_path: Path
) -> None:
    config = write_files(tmp_path, trainer={"max_steps": 20, "save_steps": 2})
    run = JobRun.submit(config, tmp_path / "run")

    run.wait_for_step(attempt=1)
    rank, srun = rank_of("generator.0", run.folder), rank_of("generator.0", run.folder, srun=True)
    srun.kill()
    log = run.folder / "attempts" / "1" / "controller.0.log"
    run.wait("generator.0 up again", lambda: "generator.0 lost" in log.read_text())
    assert not rank.is_running() or rank.wait(10.0) is not None
    steps = len(losses_of(run.folder))
    run.wait("steps afterwards", lambda: len(losses_of(run.folder)) > steps + 1)

    urgent = slurm("sbatch", "--parsable", "-purgent", "-wnode3", "--exclusive", "--wrap=true")
    first = run.wait_for_end(attempt=1)
    assert first["reason"].startswith("stopped by preemption after step"), run.said()
    assert first["reason"].endswith("with a checkpoint")
    assert first["continued_by"] == "requeue"
    slurm("scancel", urgent.strip(), check=False)
    run.start_again()

    run.wait_for_step(attempt=2)  # the generator's only node: Slurm requeues some components only
    cluster.lose_node("node3")
    second = run.wait_for_end(attempt=2)
    assert second["outcome"] == "stopped" and second["continued_by"] == "requeue", run.said()
    (tmp_path / "slow").unlink()
    cluster.return_node("node3")
    run.start_again()

    third = run.wait_for_end(attempt=3)
    assert third["outcome"] == "done", run.said()
    books_are_exact(run.folder, num_trained=20 * 4)


def test_where_requeueing_is_refused_a_new_job_continues_until_somebody_cancels_a_part(
    cluster: Cluster, tmp_path: Path
) -> None:
    config = write_files(tmp_path, trainer={"max_steps": 1000, "save_steps": 0})
    script, run = tmp_path / "by hand.sbatch", JobRun(tmp_path / "run of it's own")
    assert cli("submit", config, "--script", script).code == 0
    script.write_text(script.read_text().replace("--requeue\n", "--no-requeue\n", 1))
    first_job = subprocess.run(
        ["sbatch", "--parsable", script, config, run.folder],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()

    run.wait("run folder", lambda: (run.folder / "run.json").exists())
    run.wait_for_step(attempt=1)
    slurm("scancel", "--batch", "--signal=USR2", first_job)
    first = run.wait_for_end(attempt=1)
    assert first["continued_by"] == f"resubmission:{run.job_id}", run.said()
    assert run.job_id != first_job

    run.wait_for_step(attempt=2)
    assert run.attempts[1]["started_by"] == "resubmission"
    assert run.attempts[1]["resumed_from_step"] >= 1
    slurm("scancel", f"{run.job_id}+1")
    second = run.wait_for_end(attempt=2)
    assert second["stopped_by"] == "cancellation of component 1 (generator)", run.said()
    assert second["reason"].endswith("with a checkpoint"), run.said()
    assert second["continued_by"] == ""
    run.wait("end of the job", lambda: not run.states() & {"RUNNING", "PENDING", "COMPLETING"})
    books_are_exact(run.folder, num_trained=len(losses_of(run.folder)) * 4)


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
    for component in slurm("squeue", "-h", "-o%A", f"-j{job.job_id}").split():
        slurm("scontrol", "update", f"jobid={component}", "starttime=now")
    assert job.result() == 2
