"""Replicas killed amid a transfer, three times; the long version is the script itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "experiments/benchmarks/weight_sync_under_fire.py"


@pytest.mark.parametrize(
    ("transport", "kills"),
    [
        ("collective", 3),
        pytest.param("collective", 50, marks=pytest.mark.long),
        pytest.param("shared_memory", 50, marks=pytest.mark.long),
    ],
)
def test_a_replica_killed_amid_a_transfer_hangs_nobody_and_mixes_nothing(
    transport: str, kills: int
) -> None:
    command = [sys.executable, str(SCRIPT), "--kills", f"{kills}", "--transport", transport]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600 + 60 * kills)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["kills"] == kills
