"""Whole runs whose generators hold int8 weights: what they learn, send, store and continue."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_run import Start, lines_of, write_run_files

from analysis.accounting import accounting
from analysis.read_run import Run

pytestmark = [pytest.mark.e2e, pytest.mark.mpi]
ORACLE = Path(__file__).parents[2] / "experiments" / "single_process_loop.py"


def _steps(folder: Path) -> list[dict[str, Any]]:
    return [line for line in lines_of(folder) if "step" in line]


def _behaves(folder: Path) -> None:
    """Stored behaviour log-probs are those of another policy than the trainer's, but a near one."""
    gaps = []
    run = Run.open(folder)
    for row in range(run.store.num_rows("rollouts")):
        rollout = run.rollout_at(row)
        gap = np.abs(rollout.logprob_behaviour - rollout.logprob_trainer).max()
        if not np.isnan(gap):  # not computed: no advantage, an evaluation
            gaps.append(gap)
    assert np.median(gaps) > 1e-4 and max(gaps) < 0.5
    assert all(1e-8 < step["mismatch/kl"] < 1e-2 for step in _steps(folder))
    assert accounting(run).violations == []


def test_a_quantised_run_equals_the_single_process_loop_bit_for_bit(
    start: Start, undisturbed: Path, tmp_path: Path
) -> None:
    config, folder = write_run_files(tmp_path), tmp_path / "run"
    answer = start(
        "run",
        config,
        "--run-dir",
        folder,
        "--set=generator.quantization=int8",
        "--set=weight_sync.transport=shared_memory",
        folder=folder,
    ).finish()
    assert answer.code == 0 and answer.err == "", answer.out + answer.err
    done = subprocess.run(
        [sys.executable, str(ORACLE), str(folder / "config.yaml")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    oracle = [json.loads(line) for line in done.stdout.splitlines()]
    steps = _steps(folder)
    assert [s["loss"].hex() for s in steps] == [o["loss_hex"] for o in oracle]
    assert [s["loss"] for s in steps] != [s["loss"] for s in _steps(undisturbed)]
    _behaves(folder)

    manifest = json.loads((folder / "weights" / "manifest.json").read_text())
    dtypes = {spec["name"]: spec["dtype"] for spec in manifest["arena"]["specs"]}
    assert dtypes["model.layers.1.mlp.down_proj.weight"] == "int8"
    assert dtypes["model.layers.1.mlp.down_proj.weight_scale"] == "float32"
    assert dtypes["model.embed_tokens.weight"] == dtypes["model.norm.weight"] == "float32"


@pytest.mark.long
def test_a_quantised_run_of_zero_3_sends_less_and_resumes(
    start: Start, undisturbed: Path, tmp_path: Path
) -> None:
    config, folder = (
        write_run_files(
            tmp_path,
            trainer={"zero_stage": 3, "max_steps": 3},
            generator={"quantization": "int8", "replicas": 2},
            weight_sync={"transport": "collective", "delta": "auto"},
            resources={"trainer": {"ntasks_per_node": 2}},
        ),
        tmp_path / "run",
    )
    answer = start("run", config, "--run-dir", folder, folder=folder).finish()
    assert answer.code == 0 and answer.err == "", answer.out + answer.err
    answer = start("resume", folder, "--set", "trainer.max_steps=5", folder=folder).finish()
    assert answer.code == 0 and answer.err == "", answer.out + answer.err
    steps = _steps(folder)
    assert [step["policy_version"] for step in steps] == [1, 2, 3, 4, 5]
    _behaves(folder)
    full, sent = (_steps(f)[-1]["weight_sync/mib"] for f in (undisturbed, folder))
    embedding = 512 * 64 * 4 / 2**20
    assert sent - embedding < 0.3 * (full - embedding)
