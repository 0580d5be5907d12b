"""A trainer of two ranks learns what one rank learns, however its state and weights travel."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tiny_run import Start, attempts_of, cli, lines_of, write_run_files

from analysis.accounting import accounting
from analysis.read_run import Run

pytestmark = [pytest.mark.e2e, pytest.mark.mpi]


@pytest.mark.parametrize(
    ("zero_stage", "transport", "replicas"),
    [(1, "shared_memory", 1), (3, "collective", 2)],
)
def test_two_ranks_train_like_one(
    start: Start,
    undisturbed: Path,
    tmp_path: Path,
    zero_stage: int,
    transport: str,
    replicas: int,
) -> None:
    config = write_run_files(
        tmp_path,
        trainer={"zero_stage": zero_stage},
        generator={"replicas": replicas},
        weight_sync={"transport": transport},
        resources={"trainer": {"ntasks_per_node": 2}},
    )
    folder = tmp_path / "run"
    run = start("run", config, "--run-dir", folder, folder=folder)
    run.wait("trainer", lambda: "trainer is up" in run.out)
    assert len(run.ranks("trainer")) == 2
    answer = run.finish()
    assert answer.code == 0 and answer.err == "", answer.err
    one = [line["loss"] for line in lines_of(undisturbed) if "step" in line]
    two = [line["loss"] for line in lines_of(folder) if "step" in line]
    assert two == pytest.approx(one, abs=1e-5)
    assert accounting(Run.open(folder)).violations == []

    out = tmp_path / "export"
    assert cli("export", folder, "--out", out).code == 0
    assert (out / "model.safetensors").exists()


def test_either_rank_of_a_trainer_that_is_killed_is_named(start: Start, tmp_path: Path) -> None:
    config = write_run_files(tmp_path, resources={"trainer": {"ntasks_per_node": 2}})
    folder = tmp_path / "run"
    (tmp_path / "slow").touch()
    run = start("run", config, "--run-dir", folder, folder=folder)
    run.wait_for_step(2)
    log = (folder / "attempts" / "1" / "trainer.1.log").read_text()
    (second,) = (pid for pid in run.ranks("trainer") if f"pid {pid}" in log)
    os.kill(second, signal.SIGKILL)
    answer = run.finish(20)
    assert answer.code == 3
    assert "error: trainer rank 1 on " in answer.err
    assert f"trainer rank 1 of 2 on {attempts_of(folder)[0]['host']}, pid {second}" in answer.err
