"""The same training on one rank and on real ones under mpiexec, and checkpoints between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi_train import NUM_GROUPS
from tiny_policy import random_batch, tiny_config

from llamarl_hpc.launch.steps import MpiExec, step_environment
from llamarl_hpc.placement import World
from llamarl_hpc.training.consolidate import checkpoint_tensors
from llamarl_hpc.training.engine import TrainerEngine

pytestmark = pytest.mark.mpi

SCRIPT = Path(__file__).parent / "mpi_train.py"


def on_ranks(number: int, model_folder: Path, folder: Path, *kinds: str) -> Path:
    """Run mpi_train.py; `folder` then holds a folder for each ZeRO stage and dtype."""
    as_root = os.geteuid() == 0
    env = step_environment(tiny_config(), "trainer", base=os.environ, as_root=as_root)
    trap = folder / "hostname"  # what DeepSpeed's own discovery would call
    trap.write_text(f"#!/bin/sh\ntouch {folder}/discovered\nexit 1\n")
    trap.chmod(0o755)
    env |= {"PATH": f"{folder}:{env['PATH']}", "PYTHONPATH": str(SCRIPT.parents[2])}
    finished = subprocess.run(
        [
            *MpiExec.find().argv(number, as_root=as_root),
            *[sys.executable, str(SCRIPT), str(model_folder), str(folder)],
            *kinds,
        ],
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-5000:]
    assert not (folder / "discovered").exists()
    return folder


@pytest.fixture(scope="module")
def two_ranks(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    kinds = ["0-fp32", "1-fp32", "2-fp32", "3-fp32", "2-bf16"]
    return on_ranks(2, model_folder, folder, *kinds)


@pytest.fixture(scope="module")
def one_rank(world: World, model_folder: Path) -> list[Any]:
    return train_alone(world, model_folder, 0, len(NUM_GROUPS))[1]


@pytest.fixture(scope="module")
def four_ranks(
    world: World, model_folder: Path, two_ranks: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Trained from the start at stages 1 and 3; and, at stage 3, from step 3 of a run that two
    ranks began at stage 2 and one continued at stage 0."""
    folder = tmp_path_factory.mktemp("more-ranks")
    engine, _ = train_alone(world, model_folder, 0, 0)
    engine.load(two_ranks / "2-fp32")
    assert engine.policy_version == 2
    engine.train_step(random_batch(seed=2, step=2, num_groups=NUM_GROUPS[2]))
    engine.save(folder)
    return on_ranks(4, model_folder, folder, "1-fp32", "3-fp32", f"3-fp32={folder}")


def train_alone(
    world: World, model_folder: Path, stage: int, num_steps: int
) -> tuple[TrainerEngine, list[Any]]:
    config = tiny_config(zero_stage=stage, micro_batch_tokens=60)
    engine = TrainerEngine(config, world, model_folder)
    results = [
        engine.train_step(random_batch(seed=step, step=step, num_groups=num_groups))
        for step, num_groups in enumerate(NUM_GROUPS[:num_steps])
    ]
    return engine, results


def assert_like_one(report: dict[str, Any], results: list[Any]) -> None:
    for step, result in enumerate(results):
        theirs = report["steps"][step]
        assert theirs["loss"] == pytest.approx(result.metrics["loss"], rel=1e-6, abs=1e-6)
        for name in ("grad_norm", "is_ratio/mean", "is_ratio/max", "ess", "entropy"):
            assert theirs[name] == pytest.approx(result.metrics[name], rel=1e-5), name
        for name in ("tokens/trained", "tokens/computed", "clip_frac", "learning_rate"):
            assert theirs[name] == result.metrics[name], name
        assert report["logprobs"][step] == pytest.approx(result.logprobs.tolist(), abs=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_train_like_one(one_rank: list[Any], two_ranks: Path, stage: int) -> None:
    report = json.loads((two_ranks / f"{stage}-fp32" / "report.json").read_text())
    assert_like_one(report, one_rank)


@pytest.mark.parametrize("stage", [1, 3])
def test_four_ranks_train_like_one(one_rank: list[Any], four_ranks: Path, stage: int) -> None:
    report = json.loads((four_ranks / f"{stage}-fp32" / "report.json").read_text())
    assert_like_one(report, one_rank)
    assert report["resumed_loss"] == report["steps"][2]["loss"]


@pytest.mark.long
def test_four_ranks_train_like_one_at_every_stage(
    one_rank: list[Any], model_folder: Path, tmp_path: Path
) -> None:
    on_ranks(4, model_folder, tmp_path, "0-fp32", "1-fp32", "2-fp32", "3-fp32")
    for stage in range(4):
        report = json.loads((tmp_path / f"{stage}-fp32" / "report.json").read_text())
        assert_like_one(report, one_rank)


def test_a_run_goes_on_over_two_ranks_one_and_four(one_rank: list[Any], four_ranks: Path) -> None:
    (last,) = json.loads((four_ranks / "3-fp32" / "resumed.json").read_text())["steps"]
    undisturbed = one_rank[3].metrics
    assert last["loss"] == pytest.approx(undisturbed["loss"], rel=1e-6, abs=1e-6)
    assert last["grad_norm"] == pytest.approx(undisturbed["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("kind", ["0-fp32", "1-fp32", "2-fp32", "3-fp32", "2-bf16"])
def test_two_ranks_resume_bit_for_bit(two_ranks: Path, kind: str) -> None:
    report = json.loads((two_ranks / kind / "report.json").read_text())
    assert report["resumed_loss"] == report["steps"][2]["loss"]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_of_two_ranks_is_exported_whole_and_continued_on_one(
    world: World, model_folder: Path, two_ranks: Path, stage: int
) -> None:
    folder = two_ranks / f"{stage}-fp32"
    engine, results = train_alone(world, model_folder, stage, 3)
    exported = dict(checkpoint_tensors(folder, model_folder))
    alone, _ = train_alone(world, model_folder, 0, 0)
    alone.load(folder)
    loaded = dict(alone.export_state_dict())
    assert exported.keys() == loaded.keys()
    for name, tensor in loaded.items():
        assert torch.equal(exported[name], tensor)
    batch = random_batch(seed=2, step=2, num_groups=NUM_GROUPS[2])
    resumed = alone.train_step(batch).metrics["loss"]
    assert resumed == pytest.approx(results[2].metrics["loss"], rel=1e-6, abs=1e-6)
    for name, tensor in engine.export_state_dict():
        assert (dict(alone.export_state_dict())[name] - tensor).abs().max() < 1e-5
