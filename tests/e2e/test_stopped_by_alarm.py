"""Alarms end whole runs: nothing bad is applied or kept, and the run can go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_run import Start, attempts_of, cli, lines_of, write_run_files

pytestmark = [pytest.mark.e2e, pytest.mark.mpi]

# Rewards within float64 whose advantages are beyond float32, while a file is there.
POISON = """
import pathlib, time

FILE = pathlib.Path(__file__).with_name("poison")

def digits(prompts, completions, **columns):
    time.sleep(0.1)
    scale = 1e39 if FILE.exists() else 1.0
    return [scale * (i + sum(c in "2468" for c in text)) for i, text in enumerate(completions)]
"""


def test_a_step_that_is_not_finite_is_refused_and_stops_the_run_and_so_does_a_threshold(
    start: Start, tmp_path: Path
) -> None:
    config, folder = write_run_files(tmp_path, trainer={"save_steps": 0}), tmp_path / "run"
    (tmp_path / "digits.py").write_text(POISON)
    run = start("run", config, "--run-dir", folder, folder=folder)
    run.wait_for_step(1)
    (tmp_path / "poison").touch()
    answer = run.finish()
    (tmp_path / "poison").unlink()
    assert answer.code == 3, answer.err
    steps = [line for line in lines_of(folder) if "step" in line]
    bad, number = steps[-1], len(steps)
    assert f"stopped by an alarm after step {number}: loss" in answer.err
    assert f"the last good state is the checkpoint of step {number}" in answer.err
    assert [s["steps_refused"] for s in steps] == [0.0] * (number - 1) + [1.0]
    assert bad["policy_version"] == number - 1  # the weights are those of the step before
    (alarm,) = [line for line in lines_of(folder) if line.get("event") == "alarm"]
    assert "alarm/not_finite" in alarm
    assert attempts_of(folder)[-1]["outcome"] == "failed"

    changes = [f"alarms.entropy.{k}" for k in ("limit=1000", "steps=2", "action=stop")]
    resume = ["resume", folder, *(word for c in changes for word in ("--set", c))]
    resume += ["--set", "trainer.max_steps=20", "--set", "trainer.save_steps=1"]
    answer = start(*resume, folder=folder).finish()
    assert answer.code == 3, answer.err
    assert f"stopped by an alarm after step {number + 2}: entropy" in answer.err
    # no checkpoint of a suspicious state, although one was due after every step
    assert f"the last good state is the checkpoint of step {number}" in answer.err
    checkpoints = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert checkpoints == [f"step_{number:06d}"]
    assert cli("rollouts", "verify", folder).code == 0
