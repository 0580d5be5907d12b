"""Executors that die or hang while a run goes on: it goes on, and its books are exact."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from tiny_run import Start, attempts_of, cli, lines_of, write_run_files

from analysis.accounting import accounting, check_files
from analysis.read_run import Run

pytestmark = [pytest.mark.e2e, pytest.mark.mpi]


def test_a_run_outlives_its_generators_and_its_scorer(start: Start, tmp_path: Path) -> None:
    config = write_run_files(
        tmp_path,
        rollout={"max_completion_length": 48},  # long enough to be killed in the middle
        algorithm={"max_staleness": 2, "in_flight_weight_updates": True},
        generator={"replicas": 2},
        trainer={"max_steps": 10_000, "save_steps": 50},  # it ends when all has been tried
        channels={"heartbeat_s": 0.25, "heartbeat_timeout_s": 4.0},
    )
    folder, slow = tmp_path / "run", tmp_path / "slow"
    slow.touch()
    run = start("run", config, "--run-dir", folder, folder=folder)
    run.wait_for_step(2)
    for line in (Path("/proc") / f"{run.ranks('reward')[0]}" / "maps").read_text().splitlines():
        assert "mpich_shm_" not in line or line.endswith(
            "(deleted)"
        )  # a kill leaves no file behind
    refused = cli("resume", folder)
    assert refused.code == 2 and f"goes on as process {run.process.pid} on " in refused.err
    assert refused.err.count("\n") == 1

    for executor, victim, number in (
        ("generator.0", "rank", signal.SIGKILL),
        ("reward", "rank", signal.SIGKILL),
        ("generator.1", "mpiexec", signal.SIGKILL),
        ("generator.0", "rank", signal.SIGSTOP),
    ):
        ups = run.out.count(f"{executor} is up")
        losses = run.out.count(f"{executor} lost")
        pid = run.mpiexec(executor) if victim == "mpiexec" else run.ranks(executor)[0]
        if executor != "reward":  # or nothing would be on its way there
            wait_until_busy(run.ranks(executor)[0])
        os.kill(pid, number)
        noticed_s = run.wait_for_text(f"{executor} lost", losses + 1)
        assert noticed_s < (5.0 if number == signal.SIGKILL else 9.0), (executor, number)
        run.wait_for_text(f"{executor} is up", ups + 1)
        steps = len(lines_of(folder))
        run.wait("two more steps", lambda before=steps: len(lines_of(folder)) >= before + 2)

    assert "generator.0 lost: generator.0 rank 0 on" in run.out
    assert "died (signal SIGKILL)" in run.out
    assert "no heartbeat for" in run.out
    status, stats = cli("status", folder), cli("rollouts", "stats", folder)  # while it goes on
    assert status.code == 0 and "running" in status.out and status.err == ""
    assert stats.code == 0 and "trained" in stats.out and stats.err == ""
    slow.unlink()
    run.process.send_signal(signal.SIGTERM)
    answer = run.finish()
    assert answer.code == 4 and "stopped by SIGTERM after step" in answer.err, answer.err
    assert attempts_of(folder)[0]["outcome"] == "stopped"

    opened = Run.open(folder)
    books = accounting(opened)
    assert books.violations == [] and check_files(opened) == []
    steps = [line for line in lines_of(folder) if "step" in line]
    assert [s["step"] for s in steps] == list(range(len(steps)))
    assert books.counts["trained"] == 4 * len(steps)
    assert 0 < max(s["staleness/max"] for s in steps) <= 2
    every = opened.group_mask(lineage="all", purpose="train", status="abandoned")
    reasons = opened.decoded("reason", opened.table("groups", ["reason"], every)["reason"])
    lost = set(reasons) - {"SIGTERM"}
    assert lost and all(" lost: " in reason for reason in lost)
    assert cli("rollouts", "verify", folder).code == 0


def wait_until_busy(pid: int, within_s: float = 3.0) -> None:
    """Until a process uses the processor, for as long as a few tokens take; not for ever."""
    process, end = psutil.Process(pid), time.monotonic() + within_s
    since, before = 0.0, 0.0
    while (now := time.monotonic()) < end:
        used = sum(process.cpu_times()[:2])
        if now - since > 0.1:
            since, before = now, used
        elif used - before > 0.015:
            return
        time.sleep(0.005)


def test_a_reward_function_that_always_fails_ends_the_run_with_its_error(
    start: Start, tmp_path: Path
) -> None:
    config, folder = write_run_files(tmp_path), tmp_path / "run"
    (tmp_path / "digits.py").write_text(
        "def digits(prompts, completions, **columns):\n    return [1 / 0 for _ in completions]\n"
    )
    run = start("run", config, "--run-dir", folder, folder=folder)
    answer = run.finish()
    assert answer.code == 2
    assert "reward 'digits': ZeroDivisionError: division by zero (digits.py:2)" in answer.err
    assert "no group of step 0 could be scored" in answer.err and "Traceback" not in answer.err
    assert "could not be scored so far" in answer.out
    books = accounting(Run.open(folder))
    assert books.violations == [] and set(books.counts) == {"abandoned"}
