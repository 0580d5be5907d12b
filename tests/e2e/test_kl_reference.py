"""Whole runs with a KL term: the reference on the trainer's rank, and as an executor of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_run import LiveRun, Start, cli, lines_of, write_run_files

from analysis.accounting import accounting
from analysis.read_run import Run

pytestmark = [pytest.mark.e2e, pytest.mark.mpi]
ORACLE = Path(__file__).parents[2] / "experiments" / "single_process_loop.py"
STEPS = 5


def config_in(folder: Path, placement: str) -> Path:
    return write_run_files(
        folder,
        algorithm={"max_staleness": 0, "loss_type": "dr_grpo", "beta": 0.1},
        reference={"placement": placement, "update_steps": 2},
        trainer={"max_steps": STEPS, "save_steps": 2},
        evaluation={"num_prompts": 0},
    )


def steps_of(folder: Path) -> list[dict[str, Any]]:
    by_step = {line["step"]: line for line in lines_of(folder) if "step" in line}
    return [by_step[step] for step in range(STEPS)]


@pytest.fixture(scope="module")
def beside_the_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run whose reference is on the trainer's rank."""
    files = tmp_path_factory.mktemp("reference")
    config = config_in(files, "trainer")
    live = LiveRun("run", config, "--plain", "--run-dir", files / "run", folder=files / "run")
    try:
        answer = live.finish()
    finally:
        live.destroy()
    assert answer.code == 0 and answer.err == "", answer.out + answer.err
    return files / "run"


def test_the_reference_is_the_first_policy_and_then_that_of_every_second_step(
    beside_the_policy: Path,
) -> None:
    kl = [step["kl"] for step in steps_of(beside_the_policy)]
    assert [value == 0.0 for value in kl] == [True, False, True, False, True], kl
    assert min(kl) == 0.0 and kl[1] > 1e-6
    assert all(step["tokens/skipped_ratio"] == 0.0 for step in steps_of(beside_the_policy))
    folders = sorted(p.name for p in (beside_the_policy / "reference").iterdir())
    assert folders == ["step_000002", "step_000004"]  # a resume from step 2 needs the first
    run = Run.open(beside_the_policy)
    tokens = [
        run.store.column(f"tokens/logprob_{who}") for who in ("reference", "trainer", "behaviour")
    ]
    first = run.store.column("rollouts/completion_length")[:16].sum()
    assert np.array_equal(tokens[0][:first], tokens[1][:first])
    assert np.abs(tokens[0][:first] - tokens[2][:first]).max() < 1e-4
    assert not np.isnan(tokens[0]).any()


def test_the_pipeline_with_a_reference_equals_the_loop_bit_for_bit(
    beside_the_policy: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, str(ORACLE), str(beside_the_policy / "config.yaml")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    oracle = [json.loads(line) for line in done.stdout.splitlines()]
    steps = steps_of(beside_the_policy)
    assert [s["loss"].hex() for s in steps] == [o["loss_hex"] for o in oracle]
    assert [s["grad_norm"].hex() for s in steps] == [o["grad_norm_hex"] for o in oracle]
    assert [s["kl"] for s in steps] == [o["kl"] for o in oracle]


@pytest.mark.long
def test_a_reference_executor_is_killed_and_the_run_resumed_and_nothing_changes(
    start: Start, tmp_path: Path, beside_the_policy: Path
) -> None:
    config, folder = config_in(tmp_path, "executor"), tmp_path / "run"
    (tmp_path / "slow").touch()
    run = start("run", config, "--run-dir", folder, folder=folder)
    run.wait_for_step(1)
    run.kill("reference")
    run.wait_for_text("reference lost: ")
    run.wait_for_step(3)  # its reference is the policy of step 2, which the new one must be given
    run.process.send_signal(signal.SIGTERM)
    answer = run.finish()
    assert answer.code == 4, answer.err
    assert "reference is up" in answer.out and "died (signal SIGKILL)" in answer.out
    (tmp_path / "slow").unlink()
    answer = start("resume", folder, folder=folder).finish()
    assert answer.code == 0 and answer.err == "", answer.err

    ours, theirs = steps_of(folder), steps_of(beside_the_policy)
    for name in ("loss", "kl", "grad_norm"):
        wanted = [step[name] for step in theirs]
        assert [step[name] for step in ours] == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    assert [step["kl"] < 1e-7 for step in ours] == [True, False, True, False, True]
    assert all("idle_ratio/reference" in step for step in ours)
    assert cli("rollouts", "verify", folder).code == 0
    assert accounting(Run.open(folder)).counts == {"trained": 4 * STEPS}
