"""A run whose executors die at once, in a job that is started again and again, comes to an end."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_slurm import FakeSlurm
from tiny_run import attempts_of, cli, write_run_files

JOB = """JobId=700 JobName=a
   JobState=RUNNING Reason=None
   Requeue=1 Restarts={restarts}
   StartTime=2026-12-01T03:37:52 EndTime=Unknown
"""


@pytest.mark.timeout(900)  # for a hang
def test_a_crash_loop_is_requeued_until_its_budget_is_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm, run = FakeSlurm(tmp_path / "bin", monkeypatch), tmp_path / "run"
    slurm.answer("srun", (1, "", "srun: error: the trainer cannot start here\n"))
    launch = {"launcher": "srun", "mpi": "default", "max_attempts_without_progress": 2}
    block = {"cpus_per_task": 1}
    config = write_run_files(
        tmp_path,
        launch=launch,
        resources={"job": {"nodes": 1}, "trainer": block, "generator": block, "reward": block},
    )

    def start(*arguments: object, restarts: int) -> tuple[int, str]:
        slurm.answer("scontrol", (0, JOB.format(restarts=restarts), ""))
        environ = {"SLURM_JOB_ID": "700", "SLURM_JOB_NODELIST": "n1"}
        environ |= {"SLURM_JOB_CPUS_PER_NODE": "8", "SLURM_RESTART_COUNT": str(restarts)}
        answer = cli(*arguments, "--plain", "--requeue", timeout_s=400.0, **environ)
        assert "Traceback" not in answer.err, answer.err
        requeues = [c for c in slurm.calls("scontrol") if c["argv"] == ["requeue", "700"]]
        return answer.code, f"{len(requeues)} requeues: {answer.err}"

    code, said = start("run", config, "--run-dir", run, restarts=0)
    assert code == 0 and said.startswith("1 requeues") and "continues the run" in said, said
    code, said = start("resume", run, restarts=1)
    assert code == 3 and said.startswith("0 requeues"), said
    assert "2 attempts in a row made no progress beyond step 0" in said
    last = attempts_of(run)[-1]
    assert (last["outcome"], last["exit_code"]) == ("failed", 3)
    assert "attempt 2: " in last["not_continued"]
