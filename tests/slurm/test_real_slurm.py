"""Runs as jobs of a real Slurm on this machine, and the executor for other jobs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
from cluster import Cluster
from submitit.core import utils
from tiny_run import Answer, attempts_of, cli, lines_of, losses_of, write_run_files

from llamarl_hpc.launch.script import Component
from llamarl_hpc.launch.slurm import HetSlurmExecutor, HetSlurmJob

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

PARTITIONS: dict[str, Any] = {
    "trainer": {"partition": "trainer", "mem": "700M", "time": "5"},
    "generator": {"partition": "generator", "mem": "600M"},
    "reward": {"partition": "reward", "mem": "600M"},
}


def submit(folder: Path, *more: str, **changes: Any) -> Answer:
    file = write_run_files(folder, **changes)
    return cli("submit", file, "--run-dir", folder / "run", "--wait", *more, timeout_s=200.0)


def processes_of(executor: str, run: Path) -> list[psutil.Process]:
    wanted = {f"--run-dir={run}", f"--executor={executor}"}
    processes = psutil.process_iter(["cmdline"])
    return [p for p in processes if wanted <= set(p.info["cmdline"] or [])]


def said(folder: Path, answer: Answer) -> str:
    """Everything there is to read after a failure."""
    logs = [*folder.glob("run/slurm/*_log.*"), *folder.glob("run/attempts/*/*.log")]
    texts = [f"--- {log.name}\n{log.read_text()[-2000:]}" for log in logs]
    return "\n".join([answer.out, answer.err, *texts])


# ------------------------------------------------------------------ whole runs


def test_a_run_on_three_partitions_gives_the_losses_of_one_machine(
    cluster: Cluster, tmp_path: Path
) -> None:
    answer = submit(
        tmp_path,
        resources=PARTITIONS,
        generator={"replicas": 2, "replicas_per_node": 2},
        evaluation={"num_prompts": 0},
    )
    assert answer.code == 0, said(tmp_path, answer)
    assert ": COMPLETED" in answer.out
    run = tmp_path / "run"
    (attempt,) = attempts_of(run)
    (job,) = json.loads((run / "run.json").read_text())["jobs"]
    assert (attempt["outcome"], attempt["job_id"]) == ("done", job["id"])

    here = cli(
        "run",
        tmp_path / "config.yaml",
        "--plain",
        "--run-dir",
        tmp_path / "here",
        *("--set", "resources={}"),
        timeout_s=200.0,
    )
    assert here.code == 0, here.err
    assert losses_of(run) == losses_of(tmp_path / "here")


def test_an_ordinary_job_on_two_nodes_completes_and_continues(
    cluster: Cluster, tmp_path: Path
) -> None:
    answer = submit(
        tmp_path,
        trainer={"max_steps": 2, "save_steps": 0},
        resources={
            "job": {"partition": "all", "nodes": 2, "ntasks_per_node": 2, "mem": "1500M"},
            "trainer": {"cpus_per_task": 2},
            "generator": {"nodes": 2},  # one replica over both
        },
        evaluation={"num_prompts": 0},
    )
    assert answer.code == 0, said(tmp_path, answer)
    run = tmp_path / "run"
    assert (run / "attempts" / "1" / "generator.0.1.log").exists()
    again = cli("submit", run, "--set", "trainer.max_steps=4", "--wait", timeout_s=200.0)
    assert again.code == 0, said(tmp_path, again)
    assert len(losses_of(run)) == 4
    assert max(s["mismatch/logprob_abs_diff"] for s in lines_of(run) if "step" in s) < 1e-5
    assert [a["outcome"] for a in attempts_of(run)] == ["done", "done"]


def test_a_signal_to_the_batch_script_ends_an_attempt_with_a_checkpoint_and_a_requeue(
    cluster: Cluster, tmp_path: Path
) -> None:
    two_ranks = PARTITIONS["generator"] | {"ntasks_per_node": 2}
    file = write_run_files(
        tmp_path,
        resources=PARTITIONS | {"generator": two_ranks},
        trainer={"max_steps": 100_000},
    )
    run = tmp_path / "run"
    answer = cli("submit", file, "--run-dir", run)
    assert answer.code == 0, answer.err
    job_id = json.loads((run / "run.json").read_text())["jobs"][0]["id"]
    deadline = time.monotonic() + 90.0
    while not (attempts_of(run) and lines_of(run)):
        assert time.monotonic() < deadline, said(tmp_path, answer)
        time.sleep(0.2)
    subprocess.run(["scancel", "--batch", "--signal=USR2", job_id], check=True)
    while attempts_of(run)[0]["outcome"] == "running":
        assert time.monotonic() < deadline, said(tmp_path, answer)
        time.sleep(0.2)
    (attempt,) = attempts_of(run)
    subprocess.run(["scancel", job_id], check=True)
    assert (attempt["outcome"], attempt["exit_code"]) == ("stopped", 4), attempt
    assert (attempt["stopped_by"], attempt["continued_by"]) == ("SIGUSR2", "requeue")
    assert (run / "latest.json").exists()


def test_dead_generator_steps_are_started_again_and_the_run_completes(
    cluster: Cluster, tmp_path: Path
) -> None:
    file = write_run_files(
        tmp_path,
        resources=PARTITIONS,
        generator={"replicas": 2, "replicas_per_node": 2},
        trainer={"max_steps": 8},
        evaluation={"num_prompts": 0},
    )
    (tmp_path / "slow").touch()  # 0.1 s for every group that is scored
    run = tmp_path / "run"
    answer = cli("submit", file, "--run-dir", run)
    deadline = time.monotonic() + 120.0
    while not any("step" in line for line in lines_of(run)):
        assert time.monotonic() < deadline, said(tmp_path, answer)
        time.sleep(0.05)
    (rank,) = (p for p in processes_of("generator.1", run) if "srun" not in p.name())
    rank.kill()
    sruns = [p for p in processes_of("generator.0", run) if "srun" in p.name()]
    (srun,) = (p for p in sruns if p.ppid() not in {other.pid for other in sruns})
    srun.kill()  # the other srun is its helper, which sees to the rest
    while attempts_of(run)[0]["outcome"] == "running":
        assert time.monotonic() < deadline, said(tmp_path, answer)
        time.sleep(0.2)
    assert attempts_of(run)[0]["outcome"] == "done", said(tmp_path, answer)
    log = (run / "latest" / "controller.0.log").read_text()
    assert "generator.0 lost" in log and "generator.1 lost" in log
    assert len(losses_of(run)) == 8
    assert cli("rollouts", "verify", run).code == 0


def test_a_script_by_hand_runs_and_goes_on_when_submitted_again(
    cluster: Cluster, tmp_path: Path
) -> None:
    file = write_run_files(
        tmp_path,
        resources=PARTITIONS,
        trainer={"max_steps": 2},
        evaluation={"num_prompts": 0},
    )
    script, run = tmp_path / "by hand.sbatch", tmp_path / "run of it's own"
    assert cli("submit", file, "--script", script).code == 0
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def sbatch() -> str:
        return subprocess.run(
            ["sbatch", "--wait", script, file, run],
            cwd=tmp_path,
            env=os.environ | {"PATH": path},
            timeout=150.0,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    sbatch()
    assert len(losses_of(run)) == 2
    sbatch()
    said_in = [log.read_text() for log in tmp_path.glob("tiny-*.log")]
    assert sum("the run is complete: 2 steps" in text for text in said_in) == 1


# ------------------------------------------------------------------ the executor


def two_steps(number: int) -> tuple[int, str, list[str]]:
    """One step on each component; which nodes they ran on."""
    command = ["srun", "--het-group=0,1", "sh", "-c", "echo $SLURMD_NODENAME"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    print("said by the function")
    return 2 * number, os.environ["SLURM_HET_SIZE"], sorted(out.split())


def broken() -> None:
    raise ValueError("broken on purpose")


def sleep() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # submitit's handler sits KillWait out
    print("asleep", flush=True)
    time.sleep(100)


@pytest.fixture
def executor(cluster: Cluster, tmp_path: Path) -> HetSlurmExecutor:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    made = HetSlurmExecutor(
        tmp_path / "logs of it's",
        [
            Component(name="one", options={"partition": "trainer"}),
            Component(name="two", options={"partition": "generator", "gres": "gpu:2"}),
        ],
    )
    made.update_parameters(time=2, mem="200M")
    return made


def test_a_function_runs_as_the_batch_script_and_its_result_comes_back(
    executor: HetSlurmExecutor,
) -> None:
    job = executor.submit(two_steps, 21)
    assert isinstance(job, HetSlurmJob)
    value, size, nodes = job.result()
    assert (value, size) == (42, "2")
    assert nodes[0] in ("node1", "node2") and nodes[1] == "node3"
    job.wait_for_slurm()
    assert job.state == "COMPLETED"
    assert job.component_states == {"one": "COMPLETED", "two": "COMPLETED"}
    assert "said by the function" in str(job.stdout())


def test_an_exception_and_a_cancelled_job_are_told_apart(executor: HetSlurmExecutor) -> None:
    failing, sleeping = executor.submit(broken), executor.submit(sleep)
    assert "broken on purpose" in str(failing.exception())
    while "asleep" not in (sleeping.stdout() or ""):
        time.sleep(0.2)
    sleeping.cancel()
    error = sleeping.exception()
    assert isinstance(error, utils.UncompletedJobError) and "CANCELLED" in str(error)
    assert sleeping.component_states == {"one": "CANCELLED", "two": "CANCELLED"}
