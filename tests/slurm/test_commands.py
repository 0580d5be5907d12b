"""status, logs, cancel and resume of a run on a real cluster, and the example of docs/slurm.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from accounting import wait_for
from cluster import Cluster
from tiny_run import COMMAND, attempts_of, cli, losses_of, write_run_files

from llamarl_hpc.manage.status import read_status
from llamarl_hpc.run_dir import RunDir

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

HELD: dict[str, Any] = {
    "trainer": {"partition": "trainer", "mem": "700M", "time": "5", "options": {"hold": ""}},
    "generator": {"partition": "generator", "mem": "600M"},
    "reward": {"partition": "reward", "mem": "600M"},
}


def status(run: Path) -> dict[str, Any]:
    """Without a process: how the command shows this is tested elsewhere."""
    return read_status(RunDir.open(run))


@pytest.mark.timeout(600)
def test_a_run_waits_is_cancelled_continues_is_followed_and_is_cancelled_again(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    file = write_run_files(tmp_path, resources=HELD, trainer={"max_steps": 100_000})
    answer = cli("submit", file, "--run-dir", run, timeout_s=200.0)
    assert answer.code == 0, answer.err

    waiting = status(run)
    assert (waiting["state"], waiting["step"]) == ("queued", 0)
    first = waiting["job"]["components"][0]
    assert (first["name"], first["state"], first["reason"]) == ("trainer", "PENDING", "JobHeldUser")
    assert first["because"] == "you hold it: scontrol release JOB"
    job = waiting["job"]["job_id"]
    told = cli("cancel", f"{job}+0", timeout_s=200.0)
    assert told.code == 0, told.err
    assert told.out.splitlines()[-1] == f"job {job} is cancelled; its controller had not begun"

    again = cli("resume", run, "--set", "resources.trainer.options={}", timeout_s=200.0)
    assert again.code == 0, again.err
    logs = subprocess.Popen(
        [*COMMAND, "logs", run, "--follow"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert logs.stdout is not None
        wait_for(300.0, "step in the logs", lambda: "step" in logs.stdout.readline())
        running = status(run)
        parts = {part["name"]: part["nodes"] for part in running["job"]["components"]}
        assert running["state"] == "running" and parts["reward"] == "node4"
        assert running["job"]["end"] is not None

        told = cli("cancel", run, timeout_s=200.0)
        assert told.code == 0, told.err
        assert "with a checkpoint" in told.out.splitlines()[-1]
        out, err = logs.communicate(timeout=120.0)
    finally:
        logs.kill()
    assert logs.returncode == 0 and err == "" and "stdout | " in out
    assert (run / "latest.json").exists() and (run / "stop").exists()
    (attempt,) = attempts_of(run)
    assert (attempt["outcome"], status(run)["state"]) == ("stopped", "stopped")
    assert attempt["stopped_by"] == "a stop request"
    assert len(losses_of(run)) == status(run)["step"]


def test_the_example_of_the_document_runs_as_written(cluster: Cluster, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "slurm.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "two.py").write_text(example)
    done = subprocess.run(
        [sys.executable, "two.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200.0,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("[0, 0]\n", 0), done.stderr
