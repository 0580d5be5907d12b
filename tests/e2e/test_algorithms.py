"""Losses, advantages and sampling other than the default: whole runs against the single-process
loop."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_run import Start, cli, lines_of, write_run_files

from analysis.accounting import accounting
from analysis.read_run import Run

pytestmark = [pytest.mark.e2e, pytest.mark.mpi]
ORACLE = Path(__file__).parents[2] / "experiments" / "single_process_loop.py"

ALGORITHMS: dict[str, dict[str, Any]] = {
    "gspo": {
        "loss_type": "gspo",
        "delta": 3.0,
        "advantage": "reinforce_pp",
        "truncated_completions": "drop",
        "overlong_buffer": 80,
        "length_penalty": 0.5,
    },
    "dapo": {
        "loss_type": "dapo",
        "advantage": "group_norm",
        "entropy_coef": 0.01,
        "mismatch_correction": "truncate",
        "truncated_completions": "mask",
        "dynamic_sampling": True,
        "max_resamples": 2,
    },
}
# Often equal within a group, so that groups are replaced.
REWARD = """
def digits(prompts, completions, **columns):
    return [float(any(c in "02468" for c in text[:2])) for text in completions]
"""


NUM_STEPS = 4


def configured(files: Path, name: str) -> Path:
    config = write_run_files(
        files,
        rollout={"max_completion_length": 160},
        algorithm={"max_staleness": 0, **ALGORITHMS[name]},
        trainer={"max_steps": NUM_STEPS, "save_steps": 0},
        evaluation={"num_prompts": 0},
    )
    (files / "digits.py").write_text(REWARD)
    return config


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_pipeline_equals_the_loop_with_other_algorithms(
    start: Start, tmp_path: Path, name: str
) -> None:
    config, folder = configured(tmp_path, name), tmp_path / "run"
    commands = [["run", config, "--plain", "--run-dir", folder]]
    if "dynamic_sampling" in ALGORITHMS[name]:  # whose draws an interruption must not change
        commands[0] += ["--set", "trainer.max_steps=2"]
        commands += [["resume", folder, "--plain", "--set", f"trainer.max_steps={NUM_STEPS}"]]
    for command in commands:
        answer = start(*command, folder=folder).finish()
        assert answer.code == 0 and answer.err == "", answer.out + answer.err
    assert cli("rollouts", "verify", folder).code == 0
    steps = [line for line in lines_of(folder) if "step" in line]
    oracle = loop_of(folder / "config.yaml")
    assert [s["loss"].hex() for s in steps] == [o["loss_hex"] for o in oracle]
    assert [s["grad_norm"].hex() for s in steps] == [o["grad_norm_hex"] for o in oracle]
    assert [o["policy_version"] for o in oracle] == [1, 2, 3, 4]
    assert len({s["loss"] for s in steps}) == NUM_STEPS
    cut = max(s["completions/clipped_ratio"] for s in steps)
    assert 0.0 < cut < 1.0, cut  # so that what becomes of them was tried
    if "length_penalty" in ALGORITHMS[name]:
        assert all(s["reward/length_penalty"] > 0.0 for s in steps)
    if "dynamic_sampling" in ALGORITHMS[name]:
        replaced = [s["dynamic_sampling/replaced"] for s in steps]
        assert replaced == [o["dynamic_sampling/replaced"] for o in oracle]
        at_bound = [s["dynamic_sampling/bound_reached"] for s in steps]
        assert at_bound == [float(number == 2) for number in replaced]
        assert sum(replaced) > 0
        books = accounting(Run.open(folder))
        assert books.counts == {"trained": 4 * NUM_STEPS, "dropped": sum(replaced)}
        assert books.reasons == {"dropped: constant reward": sum(replaced)}
    losses_can_be_replayed(folder)


def loop_of(config: Path) -> list[dict[str, Any]]:
    """What the single-process loop makes of the same config, step by step."""
    done = subprocess.run(
        [sys.executable, str(ORACLE), str(config)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def losses_can_be_replayed(folder: Path) -> None:
    figures = folder / "loss.json"
    replayed = cli("rollouts", "replay-loss", folder, "--json", figures)
    assert replayed.code == 0, replayed.out + replayed.err
    again = json.loads(figures.read_text())["steps"]
    assert [row["step"] for row in again] == list(range(NUM_STEPS))
    assert all(row["difference"] < 1e-5 and row["loss"] != 0.0 for row in again)
    assert all(row["advantage_difference"] < 1e-6 for row in again)
    assert all(row["tokens"] == row["tokens_logged"] for row in again)
