"""Twenty random kills of any rank in a run of sixty steps; takes a quarter of an hour, so only when
asked:

LLAMARL_LONG_TESTS=1 python -m pytest tests/e2e/test_many_kills.py

`test_interruptions.py` is its short version.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
from tiny_run import LiveRun, Start, cli, losses_of, write_run_files

from analysis.accounting import accounting
from analysis.read_run import Run

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.mpi,
    pytest.mark.timeout(7200),
    pytest.mark.long,
]

NUM_STEPS, NUM_KILLS, SEED = 60, 20, 11
GENERATOR = ("generator.0", signal.SIGKILL)
REWARD = ("reward", signal.SIGKILL)
TRAINER = ("trainer", signal.SIGKILL)
CONTROLLER_9, CONTROLLER_15 = ("controller", signal.SIGKILL), ("controller", signal.SIGTERM)
VICTIMS = [GENERATOR, REWARD, TRAINER, CONTROLLER_9, CONTROLLER_15]


def test_twenty_random_kills_change_no_loss_and_lose_no_group(start: Start, tmp_path: Path) -> None:
    config = write_run_files(
        tmp_path,
        trainer={"max_steps": NUM_STEPS, "save_steps": 3},
        evaluation={"num_prompts": 0},
        resources={"trainer": {"ntasks_per_node": 2}},
        launch={"max_restarts": NUM_KILLS},
    )
    (tmp_path / "slow").touch()
    rng = random.Random(SEED)
    folder = tmp_path / "run"
    live = start("run", config, "--run-dir", folder, folder=folder)
    for number in range(NUM_KILLS):
        target = 1 + (number + 1) * (NUM_STEPS - 6) // NUM_KILLS + rng.randint(-1, 1)
        live.wait(f"step {target}", lambda at=target: reached(folder) >= at, timeout_s=600.0)
        executor, number_of_signal = rng.choice(VICTIMS)
        live = strike(start, live, folder, executor, number_of_signal, rng)
    (tmp_path / "slow").unlink()
    answer = live.finish(1200.0)
    assert answer.code == 0, answer.err
    books = accounting(Run.open(folder))
    assert books.violations == [] and books.in_flight == []
    assert books.counts["trained"] == NUM_STEPS * 4
    assert books.num_issued == sum(books.counts.values())
    assert cli("rollouts", "verify", folder, timeout_s=600.0).code == 0

    quiet = tmp_path / "undisturbed"
    assert cli("run", config, "--run-dir", quiet, "--plain", timeout_s=1800.0).code == 0
    assert losses_of(folder) == losses_of(quiet)


def reached(folder: Path) -> int:
    """Steps made, whichever attempt made them."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return text.count('"step"')


def strike(
    start: Start, live: LiveRun, folder: Path, executor: str, signal_: int, rng: random.Random
) -> LiveRun:
    """Kill somebody, any of its ranks; the run that goes on, or the next attempt."""
    if executor == "controller":
        live.process.send_signal(signal_)
    else:
        live.wait(executor, lambda: f"{executor} is up" in live.out, timeout_s=600.0)
        os.kill(rng.choice(live.ranks(executor)), signal_)
    if executor in ("generator.0", "reward"):
        ups = live.out.count(f"{executor} is up")
        live.wait(f"{executor} again", lambda: live.out.count(f"{executor} is up") > ups, 600.0)
        return live
    live.process.wait(600.0)
    assert live.orphans(within_s=60.0) == []
    books = accounting(Run.open(folder))
    assert books.violations == []
    return start("resume", folder, folder=folder)
