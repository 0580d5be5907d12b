"""Processes that end or hang amid a transfer, a few times; the program does it often."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "experiments/benchmarks/weight_sync_under_fire.py"
SCENES = ["collective", "delta", "shared_memory", "trainer"]


@pytest.mark.parametrize(
    ("scene", "signal", "kills"),
    [
        ("shared_memory", "KILL", 3),
        *[pytest.param(scene, "KILL", 50, marks=pytest.mark.long) for scene in SCENES],
        *[pytest.param(scene, "STOP", 3, marks=pytest.mark.long) for scene in SCENES],
    ],
)
def test_an_end_amid_a_transfer_hangs_nobody_and_mixes_nothing(
    scene: str, signal: str, kills: int
) -> None:
    command = [sys.executable, str(SCRIPT), "--scene", scene, "--signal", signal]
    command += ["--kills", f"{kills}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600 + 60 * kills)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["kills"] == kills
