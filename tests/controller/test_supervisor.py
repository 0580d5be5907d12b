"""Job steps as real processes: noticed at once, explained, and gone when they must be."""

import asyncio
import os
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from llamarl_hpc.controller.supervisor import StepCommand, Supervisor
from llamarl_hpc.errors import ConfigError, ExecutorFailed
from llamarl_hpc.executors.failure import FailureReport
from llamarl_hpc.run_dir import RunDir


class Script:
    """A launcher whose executors are one Python program."""

    def __init__(self, program: str) -> None:
        self.program = program

    def command(self, executor: str, instance: int) -> StepCommand:
        argv = [sys.executable, "-c", self.program, executor, str(instance)]
        return StepCommand(argv=argv, env=dict(os.environ))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create_at(tmp_path / "run")
    run.next_attempt()
    return run


async def test_the_death_of_a_step_is_noticed_at_once(run: RunDir) -> None:
    supervisor = Supervisor(run, 1, Script("import time; time.sleep(60)"))
    await supervisor.start("generator.0")
    start = time.monotonic()
    supervisor.kill("generator.0")
    end = await asyncio.wait_for(supervisor.exits.get(), timeout=5)
    assert time.monotonic() - start < 5
    assert (end.executor, end.instance) == ("generator.0", 1)
    assert "SIGKILL" in str(supervisor.diagnose(end))


async def test_the_error_names_executor_rank_host_and_the_last_lines(run: RunDir) -> None:
    report = FailureReport(
        executor="trainer",
        instance=1,
        rank=3,
        host="node7",
        reason="RuntimeError: boom",
        user_error=False,
        traceback="",
    )
    (run.attempt(1) / "trainer.3.failure.json").write_bytes(msgspec.json.encode(report))
    run.log(1, "trainer", 3).write_text("before\nthe last words\n")
    supervisor = Supervisor(run, 1, Script("raise SystemExit(3)"))
    await supervisor.start("trainer")
    error = supervisor.diagnose(await asyncio.wait_for(supervisor.exits.get(), timeout=20))
    assert isinstance(error, ExecutorFailed) and error.exit_code == 3
    assert "trainer rank 3 on node7: RuntimeError: boom" in str(error)
    assert str(error).endswith("the last words")


async def test_a_user_error_of_a_rank_stays_a_user_error(run: RunDir) -> None:
    report = FailureReport(
        executor="reward",
        instance=1,
        rank=0,
        host="h",
        reason="rewards.0.function is not there",
        user_error=True,
        traceback="",
    )
    (run.attempt(1) / "reward.0.failure.json").write_bytes(msgspec.json.encode(report))
    supervisor = Supervisor(run, 1, Script("raise SystemExit(2)"))
    await supervisor.start("reward")
    error = supervisor.diagnose(await asyncio.wait_for(supervisor.exits.get(), timeout=20))
    assert isinstance(error, ConfigError)
    assert str(error) == "rewards.0.function is not there"


async def test_a_report_of_an_earlier_instance_is_not_taken_for_this_one(run: RunDir) -> None:
    report = FailureReport(
        executor="reward",
        instance=1,
        rank=0,
        host="h",
        reason="old",
        user_error=False,
        traceback="",
    )
    (run.attempt(1) / "reward.0.failure.json").write_bytes(msgspec.json.encode(report))
    supervisor = Supervisor(
        run, 1, Script("raise SystemExit(0 if __import__('sys').argv[2] == '1' else 7)")
    )
    await supervisor.start("reward")
    await asyncio.wait_for(supervisor.exits.get(), timeout=20)
    await supervisor.start("reward")
    error = supervisor.diagnose(await asyncio.wait_for(supervisor.exits.get(), timeout=20))
    assert "old" not in str(error) and "exit code 7" in str(error)


async def test_stop_all_leaves_no_descendant_behind(run: RunDir) -> None:
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    supervisor = Supervisor(run, 1, Script(program))
    await supervisor.start("generator.0")
    log = run.attempt(1) / "generator.0.launch.log"
    for _ in range(200):
        if log.read_text().strip():
            break
        await asyncio.sleep(0.05)
    grandchild = int(log.read_text())
    await supervisor.stop_all(grace_s=0.1)
    deadline = time.monotonic() + 5
    while psutil.pid_exists(grandchild) and time.monotonic() < deadline:
        if psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE:
            break
        await asyncio.sleep(0.05)
    assert (
        not psutil.pid_exists(grandchild)
        or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE
    )
    assert supervisor.exits.empty()  # an end that was asked for is not reported
