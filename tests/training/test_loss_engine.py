"""Every loss through the trainer, chosen by the config: ranks, micro-batches, skipping."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from loss_configs import ALGORITHMS, name_of
from tiny_policy import random_batch, tiny_config, tiny_model

from llamarl_hpc.launch.steps import MpiExec, step_environment
from llamarl_hpc.placement import World
from llamarl_hpc.training.engine import TrainerEngine
from llamarl_hpc.types import TrainBatch

SCRIPT = Path(__file__).parent / "mpi_losses.py"
# Sums of float32 in another order; the second step sees the weights of the first.
SAME = {"loss": 1e-5, "grad_norm": 2e-5, "is_ratio/mean": 1e-5, "ess": 1e-5, "entropy": 1e-5}
EQUAL = ("tokens/trained", "clip_frac", "mismatch/corrected_frac")

each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name_of)


def two_steps(world: World, folder: Path, **settings: Any) -> list[dict[str, float]]:
    engine = TrainerEngine(tiny_config(**settings), world, folder)
    return [engine.train_step(random_batch(seed=s, step=s)).metrics for s in range(2)]


def assert_same(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for name, tolerance in SAME.items():
            assert a[name] == pytest.approx(b[name], rel=tolerance, abs=1e-6), (step, name)
        assert [a[name] for name in EQUAL] == [b[name] for name in EQUAL], step


@pytest.fixture(scope="module")
def of_two_ranks(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Metrics of every algorithm on two ranks under mpiexec."""
    report = tmp_path_factory.mktemp("losses") / "report.json"
    as_root = os.geteuid() == 0
    env = step_environment(tiny_config(), "trainer", base=os.environ, as_root=as_root)
    finished = subprocess.run(
        [
            *MpiExec.find().argv(2, as_root=as_root),
            *[sys.executable, str(SCRIPT), str(model_folder), str(report)],
        ],
        env=env | {"PYTHONPATH": str(SCRIPT.parents[2])},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-5000:]
    return json.loads(report.read_text())


@pytest.mark.mpi
@each_algorithm
def test_two_ranks_and_one_make_the_same_steps(
    world: World, model_folder: Path, of_two_ranks: Any, algorithm: dict[str, Any]
) -> None:
    whole = two_steps(world, model_folder, micro_batch_tokens=4096, algorithm=algorithm)
    assert whole[0]["grad_norm"] > 1e-4
    assert_same(of_two_ranks[name_of(algorithm)], whole)


@each_algorithm
def test_micro_batches_and_packing_make_the_same_steps(
    world: World, model_folder: Path, algorithm: dict[str, Any]
) -> None:
    whole = two_steps(world, model_folder, micro_batch_tokens=4096, algorithm=algorithm)
    cut = {"micro_batch_tokens": 40, "share_prompt": False, "logprob_chunk_tokens": 1000}
    assert_same(two_steps(world, model_folder, algorithm=algorithm, **cut), whole)


def half_without_advantage(seed: int) -> Any:
    batch = random_batch(seed=seed, step=seed)
    advantages = np.where(batch.group_index % 2 == 0, 0.0, batch.advantages)
    return msgspec.structs.replace(batch, advantages=advantages.astype(np.float32))


@each_algorithm
def test_what_is_skipped_has_no_gradient(
    world: World, model_folder: Path, algorithm: dict[str, Any]
) -> None:
    every, some = (
        TrainerEngine(
            tiny_config(algorithm=algorithm, skip_zero_advantage=skips), world, model_folder
        )
        for skips in (False, True)
    )
    for seed in range(2):
        batch = half_without_advantage(seed)
        whole, part = every.train_step(batch), some.train_step(batch)
        assert part.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=2e-5, abs=1e-6)
        assert part.metrics["grad_norm"] == pytest.approx(whole.metrics["grad_norm"], rel=2e-5)
        left_out = np.repeat(batch.advantages == 0.0, batch.completion_lengths)
        pulls_everywhere = "entropy_coef" in algorithm or "beta" in algorithm
        expected = 0.0 if pulls_everywhere else left_out.mean()
        assert part.metrics["tokens/skipped_ratio"] == pytest.approx(expected)


def in_one_pass(batch: TrainBatch) -> dict[str, Any]:
    """Log-probs and entropies [N] in float64 from the model's own logits, one row at a time."""
    model = tiny_model().double()
    prompts = np.split(batch.prompt_ids, np.cumsum(batch.prompt_lengths)[:-1])
    completions = np.split(batch.completion_ids, np.cumsum(batch.completion_lengths)[:-1])
    logprobs, entropies = [], []
    for group, completion in zip(batch.group_index, completions, strict=True):
        ids = torch.from_numpy(np.concatenate([prompts[group], completion]).astype(np.int64))
        with torch.no_grad():
            rows = model(ids[None]).logits[0, -len(completion) - 1 : -1].log_softmax(-1)
        logprobs.append(rows.gather(1, ids[-len(completion) :, None])[:, 0].numpy())
        entropies.append(-(rows.exp() * rows).sum(-1).numpy())
    return {"logprobs": np.concatenate(logprobs), "entropy": np.concatenate(entropies)}


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["aipo", "ppo", "aipo-0.1-k2", "dr_grpo-0.2"])
def test_metrics_over_ranks_and_micro_batches_are_those_of_one_pass_in_float64(
    of_two_ranks: Any, name: str
) -> None:
    found, batch = of_two_ranks[name][0], random_batch(seed=0)
    mask = batch.loss_mask
    policy = in_one_pass(batch)
    log_ratio = (policy["logprobs"] - batch.logprobs)[mask]
    ratio = np.exp(log_ratio)
    assert batch.logprobs_reference is not None
    from_reference = (policy["logprobs"] - batch.logprobs_reference)[mask]
    expected = {
        "tokens/trained": mask.sum(),
        "is_ratio/mean": ratio.mean(),
        "is_ratio/max": ratio.max(),
        "ess": ratio.sum() ** 2 / (ratio**2).sum() / mask.sum(),
        "mismatch/kl": (ratio - 1 - log_ratio).mean(),
        "mismatch/logprob_abs_diff": np.abs(log_ratio).mean(),
        "mismatch/logprob_abs_diff_max": np.abs(log_ratio).max(),
        "entropy": policy["entropy"][mask].mean(),
    }
    if name.endswith("k2"):
        expected["kl"] = 0.5 * (from_reference**2).mean()
    elif name.startswith("dr_grpo-"):
        expected["kl"] = (np.exp(-from_reference) - 1 + from_reference).mean()
    for metric, value in expected.items():
        assert found[metric] == pytest.approx(value, rel=2e-5), metric
    advantages = np.repeat(batch.advantages, batch.completion_lengths)[mask]
    if name == "aipo":
        weights = np.minimum(ratio, 4.0)
        loss = -(weights * advantages * policy["logprobs"][mask]).mean()
        assert found["loss"] == pytest.approx(loss, rel=2e-5)
        assert found["clip_frac"] == (ratio > 4.0).mean()


def test_an_entropy_bonus_alone_raises_the_entropy(world: World, model_folder: Path) -> None:
    config = tiny_config(algorithm={"entropy_coef": 1.0}, learning_rate=1e-3)
    engine = TrainerEngine(config, world, model_folder)
    batch = random_batch()
    silent = msgspec.structs.replace(batch, advantages=np.zeros_like(batch.advantages))
    metrics = [engine.train_step(silent).metrics for _ in range(4)]
    entropies = [m["entropy"] for m in metrics]
    assert entropies == sorted(entropies) and entropies[-1] > entropies[0] + 1e-3
    assert metrics[0]["loss"] == pytest.approx(-entropies[0], rel=1e-6)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_entropy_bonus_works_in_every_zero_stage(
    world: World, model_folder: Path, stage: int
) -> None:
    algorithm = {"loss_type": "gspo", "entropy_coef": 0.3}
    reference = two_steps(world, model_folder, zero_stage=0, algorithm=algorithm)
    assert_same(two_steps(world, model_folder, zero_stage=stage, algorithm=algorithm), reference)
