"""Short versions of experiments/benchmarks/rollout_store_endurance.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "experiments" / "benchmarks" / "rollout_store_endurance.py"


def endure(*words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def test_kill_9_at_any_moment_loses_nothing_that_was_flushed_and_never_a_file() -> None:
    figures = endure("crash", "--kills", "8")
    assert figures["kills"] == 8 and figures["groups_lost_after_flush"] == 0
    assert figures["groups_beyond_the_last_flush"] <= 12  # four flushes on their way together
    assert figures["groups_flushed"] > 50  # the writers did get somewhere


def test_a_reader_beside_the_writer_sees_a_growing_whole() -> None:
    figures = endure("read", "--seconds", "4")
    assert figures["looks"] > 5 and figures["groups"] > 30
    assert figures["rollouts_written_per_s"] > 0 and figures["slowest_look_s"] < 60
