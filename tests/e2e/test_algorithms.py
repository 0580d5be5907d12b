"""Losses and advantages other than the default: whole runs against the single-process loop."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_run import LiveRun, cli, lines_of, write_run_files

pytestmark = [pytest.mark.e2e, pytest.mark.mpi]
ORACLE = Path(__file__).parents[2] / "experiments" / "single_process_loop.py"

ALGORITHMS: dict[str, dict[str, Any]] = {
    "gspo": {
        "loss_type": "gspo",
        "advantage": "reinforce_pp",
        "truncated_completions": "drop",
        "overlong_buffer": 80,
    },
    "dapo": {
        "loss_type": "dapo",
        "advantage": "group_norm",
        "entropy_coef": 0.01,
        "mismatch_correction": "truncate",
        "delta": 3.0,
        "truncated_completions": "mask",
        "length_penalty": 0.5,
    },
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_pipeline_equals_the_loop_with_other_algorithms(tmp_path: Path, name: str) -> None:
    config = write_run_files(
        tmp_path,
        rollout={"max_completion_length": 160},
        algorithm={"max_staleness": 0, **ALGORITHMS[name]},
        trainer={"max_steps": 3, "save_steps": 0},
        evaluation={"num_prompts": 0},
    )
    folder = tmp_path / "run"
    live = LiveRun("run", config, "--plain", "--run-dir", folder, folder=folder)
    try:
        answer = live.finish()
    finally:
        live.destroy()
    assert answer.code == 0 and answer.err == "", answer.out + answer.err
    assert cli("rollouts", "verify", folder).code == 0
    replayed = cli("rollouts", "replay-loss", folder, "--json", tmp_path / "loss.json")
    assert replayed.code == 0, replayed.out + replayed.err
    again = json.loads((tmp_path / "loss.json").read_text())["steps"]
    assert [row["step"] for row in again] == [0, 1, 2]
    assert all(row["difference"] < 1e-5 and row["loss"] != 0.0 for row in again)
    assert all(row["advantage_difference"] < 1e-6 for row in again)
    assert all(row["tokens"] == row["tokens_logged"] for row in again)
    done = subprocess.run(
        [sys.executable, str(ORACLE), str(folder / "config.yaml")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    oracle = [json.loads(line) for line in done.stdout.splitlines()]
    steps = [line for line in lines_of(folder) if "step" in line]
    assert [s["loss"].hex() for s in steps] == [o["loss_hex"] for o in oracle]
    assert [s["grad_norm"].hex() for s in steps] == [o["grad_norm_hex"] for o in oracle]
    assert [o["policy_version"] for o in oracle] == [1, 2, 3]
    assert len({s["loss"] for s in steps}) == 3
    cut = max(s["completions/clipped_ratio"] for s in steps)
    assert 0.0 < cut < 1.0, cut  # so that what becomes of them was tried
    assert all(s["reward/length_penalty"] > 0.0 for s in steps)
