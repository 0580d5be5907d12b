"""Alarms end whole runs: nothing bad is applied or kept, and the run can go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_run import Start, attempts_of, cli, lines_of, write_run_files

from analysis.read_run import Run

pytestmark = [pytest.mark.e2e, pytest.mark.mpi]

# While a file is there: `poison`, rewards within float64 whose advantages are beyond float32;
# `dull`, rewards that are equal within a group, and lower in every later one.
REWARD = """
import pathlib, time

POISON, DULL = (pathlib.Path(__file__).with_name(name) for name in ("poison", "dull"))

def digits(prompts, completions, **columns):
    time.sleep(0.1)
    if DULL.exists():
        with DULL.open("a") as file:
            file.write("x")
        return [-float(DULL.stat().st_size)] * len(completions)
    scale = 1e39 if POISON.exists() else 1.0
    return [scale * (i + sum(c in "2468" for c in text)) for i, text in enumerate(completions)]
"""
# True in any run, for as many steps in a row; one of them begins with the one that stops.
BEYOND = {
    "no_signal": {"steps": 1},
    "ess": {"limit": 2.0, "steps": 3},
    "mismatch_kl": {"limit": 0.0, "steps": 1},
    "entropy": {"limit": 1000.0, "steps": 3, "action": "stop"},
    "reward": {"limit": 0.001, "steps": 1, "action": "warn"},
    "length": {"limit": 1.000001, "steps": 1, "action": "warn"},
}


def test_a_step_that_is_not_finite_is_refused_and_stops_the_run_and_so_does_a_threshold(
    start: Start, tmp_path: Path
) -> None:
    config = write_run_files(
        tmp_path,
        rollout={"max_completion_length": 160},  # so that no two steps are of the same length
        trainer={"save_steps": 0, "skip_zero_advantage": False},
    )
    folder = tmp_path / "run"
    (tmp_path / "digits.py").write_text(REWARD)
    run = start("run", config, "--run-dir", folder, folder=folder)
    run.wait_for_step(1)
    (tmp_path / "poison").touch()
    answer = run.finish()
    (tmp_path / "poison").unlink()
    assert answer.code == 3, answer.err
    steps = [line for line in lines_of(folder) if "step" in line]
    bad, number = steps[-1], len(steps)
    assert f"stopped by an alarm after step {number - 1}: loss" in answer.err
    assert f"the last good state is the checkpoint of step {number}" in answer.err
    assert [s["steps_refused"] for s in steps] == [0.0] * (number - 1) + [1.0]
    assert bad["policy_version"] == number - 1  # the weights are those of the step before
    (alarm,) = [line for line in lines_of(folder) if line.get("event") == "alarm"]
    assert "alarm/not_finite" in alarm
    assert attempts_of(folder)[-1]["outcome"] == "failed"

    (tmp_path / "dull").touch()
    changes = [f"alarms.{name}={json.dumps(alarm)}" for name, alarm in BEYOND.items()]
    changes += ["generator.dtype=bf16"]  # for a mismatch
    changes += ["trainer.max_steps=20", "trainer.save_steps=1"]
    resume = ["resume", folder, *(word for change in changes for word in ("--set", change))]
    answer = start(*resume, folder=folder).finish()
    assert answer.code == 3, answer.err
    assert f"stopped by an alarm after step {number + 2}: entropy" in answer.err
    begun = [
        (line["policy_version"] - bad["policy_version"], key.removeprefix("alarm/"))
        for line in lines_of(folder)
        if line.get("event") == "alarm" and line["attempt"] == 2
        for key in line
        if key.startswith("alarm/")
    ]
    assert {name for _, name in begun} == set(BEYOND), begun
    assert (3, "entropy") in begun and (3, "ess") in begun
    # no checkpoint of a suspicious state, although one was due after every step
    assert f"the last good state is the checkpoint of step {number}" in answer.err
    checkpoints = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert checkpoints == [f"step_{number:06d}"]
    assert cli("rollouts", "verify", folder).code == 0
    # the refused step is no version, so none of the later ones is stale
    rollouts = Run.open(folder).rollouts()
    assert set(rollouts[rollouts["status"] == "trained"]["staleness"]) == {0}
