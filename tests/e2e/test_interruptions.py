"""Runs that are interrupted and continued: nothing is lost, nothing is trained twice, and with
max_staleness 0 the losses are those of an undisturbed run, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from tiny_run import Start, attempts_of, cli, losses_of, write_run_files

from analysis.accounting import accounting
from analysis.read_run import Run

pytestmark = [pytest.mark.e2e, pytest.mark.mpi]


def books_are_sound(folder: Path) -> None:
    books = accounting(Run.open(folder))
    assert books.violations == []
    assert books.num_issued == sum(books.counts.values()) + len(books.in_flight)


def test_sigterm_and_kills_cost_no_step_and_change_no_loss(
    start: Start, undisturbed: Path, tmp_path: Path
) -> None:
    config, folder, slow = write_run_files(tmp_path), tmp_path / "run", tmp_path / "slow"
    slow.touch()

    # SIGTERM to the controller: a checkpoint, exit 4.
    run = start("run", config, "--run-dir", folder, folder=folder)
    run.wait_for_step(1)
    run.process.send_signal(signal.SIGTERM)
    answer = run.finish(20)
    assert answer.code == 4
    assert "stopped by SIGTERM after step" in answer.err
    assert f"llamarl-hpc resume {folder}" in answer.err
    assert "Traceback" not in answer.err
    (first,) = attempts_of(folder)
    assert first["outcome"] == "stopped" and first["exit_code"] == 4
    assert "stopped" in cli("status", folder).out
    books_are_sound(folder)

    # kill -9 of the controller: everything goes with it.
    run = start("resume", folder, folder=folder)
    run.wait_for_text("continuing after step")
    run.wait_for_step(3)
    run.process.kill()
    run.process.wait()
    assert run.orphans(within_s=10.0) == []
    assert "killed" in cli("status", folder).out
    books_are_sound(folder)

    # kill -9 of the trainer: exit 3, and why. Its weights do not stay in memory.
    run = start("resume", folder, folder=folder)
    run.wait_for_step(4)
    trainer = run.ranks("trainer")[0]
    weights = Path(json.loads((folder / "weights" / "manifest.json").read_text())["path"])
    assert weights.exists()
    killed_at = time.monotonic()
    os.kill(trainer, signal.SIGKILL)
    answer = run.finish(20)
    assert time.monotonic() - killed_at < 5.0
    assert answer.code == 3
    assert not weights.exists()
    error = answer.err[answer.err.index("error: ") :]
    assert f"error: trainer rank 0 on {os.uname().nodename}: died (signal SIGKILL)" in error
    assert f"trainer rank 0 of 1 on {os.uname().nodename}, pid {trainer}" in error  # its log
    assert "Traceback" not in answer.err
    assert attempts_of(folder)[-1]["outcome"] == "failed"
    books_are_sound(folder)

    slow.unlink()
    run = start("resume", folder, folder=folder)
    answer = run.finish()
    assert answer.code == 0, answer.err
    assert [a["outcome"] for a in attempts_of(folder)] == ["stopped", "running", "failed", "done"]
    assert losses_of(folder) == losses_of(undisturbed)
    books_are_sound(folder)
    assert accounting(Run.open(folder)).counts["trained"] == 24
    assert answer.out.count(" of 8 ") == 2  # the table: version 0 and version 6, each once


def test_ctrl_c_during_start_up_and_twice_in_a_step(start: Start, tmp_path: Path) -> None:
    config, folder = write_run_files(tmp_path), tmp_path / "run"
    run = start("run", config, "--run-dir", folder, folder=folder)
    run.wait("executors", lambda: bool(run.ranks("trainer")))
    run.process.send_signal(signal.SIGINT)
    answer = run.finish(3)
    assert answer.code == 4
    assert "stopped by SIGINT before step 0 (0 of 6), at the start" in answer.err
    assert attempts_of(folder)[0]["outcome"] == "stopped"

    (tmp_path / "slow").touch()
    run = start("resume", folder, folder=folder)
    run.wait_for_step(1)
    run.process.send_signal(signal.SIGINT)
    run.wait_for_text("stopping after this step")
    asked_at = time.monotonic()
    while run.process.poll() is None:  # once more would do, but people are impatient
        run.process.send_signal(signal.SIGINT)
        time.sleep(0.03)
    assert time.monotonic() - asked_at < 5.0
    answer = run.finish(0)
    assert attempts_of(folder)[-1]["outcome"] == "stopped"
    assert answer.code == 4  # the step, and its checkpoint, may have been quicker than the second
    assert "at once" in answer.err or "with a checkpoint" in answer.err, answer.err
    books_are_sound(folder)


def test_a_closed_terminal_stops_a_run_like_a_signal(start: Start, tmp_path: Path) -> None:
    config, folder = write_run_files(tmp_path), tmp_path / "run"
    (tmp_path / "slow").touch()
    reader, writer = os.pipe()
    run = start("run", config, "--run-dir", folder, folder=folder, stdout=writer)
    os.close(writer)
    assert os.read(reader, 11) == b"run folder:"
    os.close(reader)  # nobody reads on: `llamarl-hpc run ... | head -1`
    run.wait_for_step(2)
    run.process.send_signal(signal.SIGHUP)
    answer = run.finish(20)
    assert answer.code == 4
    assert "stopped by SIGHUP after step" in answer.err and "with a checkpoint" in answer.err
    assert "Traceback" not in answer.err and "BrokenPipe" not in answer.err
    books_are_sound(folder)
