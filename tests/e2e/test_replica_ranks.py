"""A generator replica of two ranks: it draws what one rank draws, takes weights on both or on
neither, and is lost and started again as a whole."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tiny_run import Start, cli, lines_of, write_run_files

from analysis.accounting import accounting
from analysis.read_run import Run

pytestmark = [pytest.mark.e2e, pytest.mark.mpi]

TWO_RANKS = {"generator": {"ntasks_per_node": 2}}


@pytest.mark.parametrize(
    "transport", [pytest.param("shared_memory", marks=pytest.mark.long), "collective"]
)
def test_two_ranks_generate_like_one(
    start: Start, undisturbed: Path, tmp_path: Path, transport: str
) -> None:
    config = write_run_files(
        tmp_path,
        weight_sync={"transport": transport},
        resources=TWO_RANKS,
        trainer={"max_steps": 3},
    )
    folder = tmp_path / "run"
    run = start("run", config, "--run-dir", folder, folder=folder)
    run.wait("generator", lambda: "generator.0 is up" in run.out)
    assert len(run.ranks("generator.0")) == 2
    answer = run.finish()
    assert answer.code == 0 and answer.err == "", answer.err
    one = [line for line in lines_of(undisturbed) if "step" in line][:3]
    two = [line for line in lines_of(folder) if "step" in line]
    for key in ("loss", "reward/mean", "completions/mean_length", "entropy"):
        assert [line[key] for line in two] == pytest.approx([line[key] for line in one], abs=1e-4)
    # the trainer computes the log-probs of what both ranks drew together
    assert max(line["mismatch/logprob_abs_diff"] for line in two) < 1e-5
    assert accounting(Run.open(folder)).violations == []


def test_a_replica_goes_on_after_either_of_its_ranks_is_killed_and_takes_weights_in_flight(
    start: Start, tmp_path: Path
) -> None:
    config = write_run_files(
        tmp_path,
        algorithm={"max_staleness": 2, "in_flight_weight_updates": True},
        generator={"recompute_kv_cache": True, "max_concurrency": 8},
        trainer={"max_steps": 8, "eval_steps": 4},
        weight_sync={"transport": "collective", "replica_memory": "parts"},
        resources=TWO_RANKS,
    )
    folder = tmp_path / "run"
    (tmp_path / "slow").touch()
    run = start("run", config, "--run-dir", folder, folder=folder)
    run.wait_for_step(2)
    log = (folder / "attempts" / "1" / "generator.0.1.log").read_text()
    (follower,) = (pid for pid in run.ranks("generator.0") if f"pid {pid}" in log)
    os.kill(follower, signal.SIGKILL)
    run.wait_for_text("generator.0 lost: generator.0 rank 1 on")
    run.wait_for_text("generator.0 is up", times=2)
    (tmp_path / "slow").unlink()
    answer = run.finish()
    assert answer.code == 0, answer.err
    steps = [line for line in lines_of(folder) if "step" in line]
    assert [line["step"] for line in steps] == list(range(8))
    books = accounting(Run.open(folder))
    assert books.violations == [] and books.counts["trained"] == 32


def test_more_ranks_than_the_model_has_heads_is_said_at_once(tmp_path: Path) -> None:
    config = write_run_files(tmp_path, resources={"generator": {"ntasks_per_node": 3}})
    answer = cli("run", config, "--run-dir", tmp_path / "run")
    assert answer.code == 2
    assert "resources.generator asks for 3 ranks" in answer.err
    assert "the model has 2 heads of keys and values" in answer.err
    assert not (tmp_path / "run").exists()
