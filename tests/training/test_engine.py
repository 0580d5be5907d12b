"""TrainerEngine on one rank: one step per batch, equal stages, exact resume, no lost token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tiny_policy import random_batch, save_tiny_model, tiny_config
from torch import Tensor

from llamarl_hpc.errors import ConfigError, LlamarlError, StoreError
from llamarl_hpc.placement import World
from llamarl_hpc.training.consolidate import checkpoint_tensors
from llamarl_hpc.training.engine import TrainerEngine


def engine_of(world: World, folder: Path, **trainer: Any) -> TrainerEngine:
    return TrainerEngine(tiny_config(**trainer), world, folder)


def losses(engine: TrainerEngine, num_steps: int = 3, first: int = 0) -> list[float]:
    """Losses of fixed batches; the last ones depend on every update before."""
    steps = range(first, first + num_steps)
    return [engine.train_step(random_batch(seed=s, step=s)).metrics["loss"] for s in steps]


def nearly(losses: Sequence[float], rel: float = 1e-6) -> Any:
    """Equal up to rounding. A loss is a sum of terms of order one and of both signs: what rounding
    does to it is not in proportion to what is left of it."""
    return pytest.approx(losses, rel=rel, abs=3e-6)


def weights_of(engine: TrainerEngine) -> dict[str, Tensor]:
    return dict(engine.export_state_dict())


@pytest.fixture(scope="module")
def reference(world: World, model_folder: Path) -> list[float]:
    return losses(engine_of(world, model_folder, zero_stage=0))


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_1_and_2_give_the_losses_of_stage_0_bit_for_bit(
    world: World, model_folder: Path, reference: list[float], stage: int
) -> None:
    assert losses(engine_of(world, model_folder, zero_stage=stage)) == reference


def test_zero_3_gives_the_losses_of_stage_0(
    world: World, model_folder: Path, reference: list[float]
) -> None:
    # its gradient norm is summed in another order, so the clipping differs in the last bit
    assert losses(engine_of(world, model_folder, zero_stage=3)) == nearly(reference)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_stages_agree_and_keep_float32_masters(
    world: World, model_folder: Path, reference: list[float], stage: int
) -> None:
    engine = engine_of(world, model_folder, zero_stage=stage, dtype="bf16")
    assert losses(engine) == nearly(reference, 0.02)
    assert {s.dtype for s in engine.parameter_specs()} == {"bfloat16"}
    before = weights_of(engine)
    tiny = engine_of(world, model_folder, zero_stage=stage, dtype="bf16", learning_rate=2e-5)
    losses(tiny, 1)
    small = weights_of(tiny)
    losses(tiny, 12)  # steps below bf16's spacing: without masters they would all be lost
    moved = [(weights_of(tiny)[n] != small[n]).float().mean().item() for n in before]
    assert max(moved) > 0.2


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch_tokens": 40},
        {"share_prompt": False},
        {"share_prompt": False, "micro_batch_tokens": 64},
        {"logprob_chunk_tokens": 1000},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "zero_stage": 3},
        {"zero_stage": 2, "micro_batch_tokens": 40},
        {"zero_stage": 3, "micro_batch_tokens": 40},
    ],
)
def test_how_a_batch_is_cut_changes_nothing(
    world: World, model_folder: Path, reference: list[float], settings: dict[str, Any]
) -> None:
    engine = engine_of(world, model_folder, **settings)
    assert losses(engine) == nearly(reference, 2e-5)


def test_log_probs_come_back_in_the_order_of_the_batch(world: World, model_folder: Path) -> None:
    batch = random_batch(num_groups=6)
    together = engine_of(world, model_folder).train_step(batch).logprobs
    apart = engine_of(world, model_folder, micro_batch_tokens=8, share_prompt=False).train_step(
        batch
    )
    assert together.dtype == np.float32 and together.shape == batch.completion_ids.shape
    np.testing.assert_allclose(apart.logprobs, together, atol=2e-5)
    assert apart.metrics["micro_batches"] == 24


def test_leaving_out_rollouts_without_signal_changes_no_update(
    world: World, model_folder: Path
) -> None:
    batches = []
    for step in range(3):
        batch = random_batch(seed=step, step=step)
        advantages = np.where(batch.group_index % 2 == 0, 0.0, batch.advantages)
        batches.append(msgspec.structs.replace(batch, advantages=advantages.astype(np.float32)))
    every = engine_of(world, model_folder, skip_zero_advantage=False)
    some = engine_of(world, model_folder, skip_zero_advantage=True)
    for batch in batches:
        whole, part = every.train_step(batch), some.train_step(batch)
        assert part.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=2e-5)
        assert part.metrics["grad_norm"] == pytest.approx(whole.metrics["grad_norm"], rel=2e-5)
        left_out = np.repeat(batch.advantages == 0.0, batch.completion_lengths)
        assert np.isnan(part.logprobs).tolist() == left_out.tolist()
        assert part.metrics["tokens/skipped_ratio"] == pytest.approx(left_out.mean())
    assert some.policy_version == every.policy_version == 3


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_batch_is_one_optimizer_step_whatever_its_micro_batches(
    world: World, model_folder: Path, stage: int
) -> None:
    engine = engine_of(world, model_folder, zero_stage=stage, micro_batch_tokens=60)
    counts = []
    for step, num_groups in enumerate((4, 2, 6)):
        batch = random_batch(seed=step, num_groups=num_groups, step=step)
        counts.append(engine.train_step(batch).metrics["micro_batches"])
        assert engine.policy_version == step + 1
    assert len(set(counts)) == 3
    whole = engine_of(world, model_folder, zero_stage=stage, micro_batch_tokens=4096)
    for step, num_groups in enumerate((4, 2, 6)):
        whole.train_step(random_batch(seed=step, num_groups=num_groups, step=step))
    for name, tensor in weights_of(engine).items():
        torch.testing.assert_close(tensor, weights_of(whole)[name], rtol=0, atol=2e-4)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_batch_without_a_token_to_train_is_no_step(
    world: World, model_folder: Path, stage: int
) -> None:
    engine = engine_of(world, model_folder, zero_stage=stage, skip_zero_advantage=False)
    before = weights_of(engine)
    batch = random_batch()
    masked = msgspec.structs.replace(batch, loss_mask=np.zeros_like(batch.loss_mask))
    result = engine.train_step(masked)
    assert result.metrics["loss"] == 0.0
    assert result.metrics["tokens/trained"] == 0.0
    assert engine.policy_version == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(engine).items())
    trained = engine.train_step(batch)  # and the engine is none the worse for it
    np.testing.assert_allclose(trained.logprobs, result.logprobs, atol=1e-6)
    assert engine.policy_version == 1


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (0, "bf16"), (2, "bf16")],
)
def test_a_gradient_that_is_not_finite_changes_nothing_and_the_third_one_ends_the_run(
    world: World, model_folder: Path, stage: int, dtype: str
) -> None:
    engine = engine_of(world, model_folder, zero_stage=stage, dtype=dtype)
    batch = random_batch()
    broken = msgspec.structs.replace(batch, advantages=np.full_like(batch.advantages, np.inf))
    before = weights_of(engine)
    for _ in range(2):
        assert engine.train_step(broken).metrics["steps_refused"] == 1.0
    assert engine.policy_version == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(engine).items())
    fresh = engine_of(world, model_folder, zero_stage=stage, dtype=dtype)
    expected = fresh.train_step(batch).metrics
    actual = engine.train_step(batch).metrics
    assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
    for _ in range(2):
        engine.train_step(broken)
    with pytest.raises(LlamarlError, match="not finite 3 times"):
        engine.train_step(broken)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_clipping_bounds_the_update_and_reports_the_norm_before(
    world: World, model_folder: Path, max_grad_norm: float
) -> None:
    norms = [
        engine_of(world, model_folder, zero_stage=stage, max_grad_norm=max_grad_norm)
        .train_step(random_batch())
        .metrics["grad_norm"]
        for stage in (0, 1, 3)
    ]
    assert norms == pytest.approx([5.0865550] * 3, rel=1e-5)


def test_the_learning_rate_follows_applied_steps(world: World, model_folder: Path) -> None:
    engine = engine_of(world, model_folder, warmup_steps=2, learning_rate=1e-3)
    rates = [engine.train_step(random_batch(seed=s)).metrics["learning_rate"] for s in range(3)]
    assert rates == [5e-4, 1e-3, 1e-3]


def test_on_policy_ratio_is_one_at_every_temperature(world: World, model_folder: Path) -> None:
    for temperature in (0.5, 1.0, 1.3):
        engine = engine_of(world, model_folder, learning_rate=0.0)
        batch = random_batch(temperature=temperature)
        logprobs = engine.train_step(batch).logprobs
        again = engine.train_step(msgspec.structs.replace(batch, logprobs=logprobs)).metrics
        assert again["is_ratio/mean"] == pytest.approx(1.0, abs=1e-6)
        assert again["mismatch/kl"] == pytest.approx(0.0, abs=1e-10)
        assert again["ess"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_resume_continues_bit_for_bit(
    world: World, model_folder: Path, tmp_path: Path, stage: int, dtype: str
) -> None:
    engine = engine_of(world, model_folder, zero_stage=stage, dtype=dtype, weight_decay=0.1)
    losses(engine, 2)
    engine.save(tmp_path)
    torch.manual_seed(1234)
    noise = torch.rand(3)
    uninterrupted = losses(engine, 3, first=2)
    torch.manual_seed(1234)
    engine.save(tmp_path / "second")
    resumed = engine_of(world, model_folder, zero_stage=stage, dtype=dtype, weight_decay=0.1)
    resumed.load(tmp_path)
    assert resumed.policy_version == 2
    assert losses(resumed, 3, first=2) == uninterrupted
    resumed.load(tmp_path / "second")
    assert torch.equal(torch.rand(3), noise)
    for name, tensor in weights_of(engine).items():
        assert torch.equal(tensor, weights_of(resumed)[name])


def test_a_checkpoint_is_continued_at_every_other_stage_and_dtype(
    world: World, model_folder: Path, tmp_path: Path
) -> None:
    settings = {"weight_decay": 0.1, "warmup_steps": 4}
    undisturbed = losses(engine_of(world, model_folder, zero_stage=0, **settings), 9)
    step = 0
    for stage, dtype in ((2, "fp32"), (0, "fp32"), (3, "fp32"), (1, "fp32"), (0, "bf16")):
        engine = engine_of(world, model_folder, zero_stage=stage, dtype=dtype, **settings)
        if step:
            engine.load(tmp_path / f"{step}")
            assert engine.policy_version == step
        part = losses(engine, 2 if step < 8 else 1, first=step)
        tolerance = 1e-6 if dtype == "fp32" else 0.02
        assert part == nearly(undisturbed[step : step + len(part)], tolerance)
        step += len(part)
        engine.save(tmp_path / f"{step}")
    back = engine_of(world, model_folder, zero_stage=3, dtype="bf16", **settings)
    back.load(tmp_path / "9")
    for name, tensor in weights_of(engine).items():  # rounded from the same float32 weights
        assert torch.equal(tensor, weights_of(back)[name])


@pytest.mark.parametrize(
    ("stage", "dtype", "parameters"),
    [(1, "fp32", False), (2, "bf16", False), (3, "fp32", False), (3, "bf16", True)],
)
def test_an_optimizer_in_host_memory_makes_the_same_steps_and_checkpoints(
    world: World, model_folder: Path, tmp_path: Path, stage: int, dtype: str, parameters: bool
) -> None:
    here = losses(engine_of(world, model_folder, zero_stage=stage, dtype=dtype), 4)
    host = {"offload_optimizer": True, "offload_parameters": parameters}
    engine = engine_of(world, model_folder, zero_stage=stage, dtype=dtype, **host)
    assert losses(engine, 2) == nearly(here[:2])
    engine.save(tmp_path)
    assert losses(engine, 2, first=2) == nearly(here[2:])
    back = engine_of(world, model_folder, zero_stage=1, dtype=dtype)
    back.load(tmp_path)
    assert losses(back, 2, first=2) == nearly(here[2:])


def test_a_checkpoint_of_before_the_first_step_starts_the_same_run(
    world: World, model_folder: Path, tmp_path: Path, reference: list[float]
) -> None:
    for stage in (0, 1, 3):
        engine_of(world, model_folder, zero_stage=stage).save(tmp_path / f"{stage}")
        engine = engine_of(world, model_folder, zero_stage=stage)
        engine.load(tmp_path / f"{stage}")
        assert losses(engine) == nearly(reference)


def test_a_checkpoint_that_does_not_fit_is_refused(
    world: World, model_folder: Path, tmp_path: Path
) -> None:
    engine = engine_of(world, model_folder)
    engine.save(tmp_path)
    other = engine_of(world, save_tiny_model(tmp_path / "model", tied=False))
    with pytest.raises(ConfigError, match=r"holds lm_head.weight with shape None but this model"):
        other.load(tmp_path)
    with pytest.raises(StoreError, match="nowhere"):
        engine.load(tmp_path / "nowhere")
    description = tmp_path / "zero" / "trainer.json"
    saved = json.loads(description.read_text())
    description.write_text(json.dumps({**saved, "ranks": 2}))
    with pytest.raises(StoreError, match="shard_00001"):
        engine.load(tmp_path)
    description.write_text(json.dumps({**saved, "format": 1}))
    with pytest.raises(StoreError, match="is of format 1, this version reads 2"):
        engine.load(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_are_read_locally_and_exported_whole(
    world: World, tmp_path: Path, stage: int, tied: bool
) -> None:
    folder = save_tiny_model(tmp_path / "model", tied=tied)
    engine = engine_of(world, folder, zero_stage=stage)
    losses(engine, 2)
    specs, exported = engine.parameter_specs(), weights_of(engine)
    assert [s.name for s in specs] == list(exported)
    assert ("lm_head.weight" in exported) is not tied
    assert "model.embed_tokens.weight" in exported
    for spec in specs:
        assert spec.dtype == "float32"
        assert exported[spec.name].shape == spec.shape
        owned = engine.owned_range(spec.name)
        assert owned == ((0, spec.numel) if stage == 3 else None)
        flat = exported[spec.name].flatten()
        assert torch.equal(engine.read(spec.name, 0, spec.numel), flat)
        assert torch.equal(engine.read(spec.name, 5, 9), flat[5:9])


def test_an_exported_model_has_the_logits_of_the_trainer(world: World, model_folder: Path) -> None:
    from llamarl_hpc.models.load import load_trainer_model

    engine = engine_of(world, model_folder)
    batch = random_batch(num_groups=1, num_generations=1)
    losses(engine, 2)
    fresh = load_trainer_model(model_folder, "fp32")
    missing, unexpected = fresh.load_state_dict(weights_of(engine), strict=False)
    assert missing == ["lm_head.weight"] and not unexpected  # tied: it follows the embedding
    ids = np.concatenate([batch.prompt_ids, batch.completion_ids]).astype(np.int64)
    with torch.no_grad():
        logits = fresh(torch.from_numpy(ids)[None]).logits[0].log_softmax(-1)
    expected = logits[len(batch.prompt_ids) - 1 : -1].gather(
        -1, torch.from_numpy(batch.completion_ids.astype(np.int64))[:, None]
    )
    np.testing.assert_allclose(
        engine.train_step(batch).logprobs, expected.squeeze(-1).numpy(), atol=1e-5
    )


def test_metrics_say_what_was_computed(world: World, model_folder: Path) -> None:
    batch = random_batch()
    metrics = engine_of(world, model_folder).train_step(batch).metrics
    assert metrics["tokens/trained"] == int(batch.loss_mask.sum())
    predicting = len(batch.completion_ids) - len(batch.completion_lengths)  # all but the last
    assert metrics["tokens/computed"] == len(batch.prompt_ids) + predicting
    assert metrics["tokens/padded"] >= metrics["tokens/computed"]
    assert metrics["perf/tokens_per_second"] == pytest.approx(
        metrics["tokens/computed"] / metrics["time/train"]
    )
    assert 0.1 < metrics["perf/peak_memory_gib"] < 20


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (1, "bf16"), (3, "fp32"), (3, "bf16")])
def test_a_checkpoint_becomes_whole_tensors_without_an_engine(
    world: World, tmp_path: Path, stage: int, dtype: str, tied: bool
) -> None:
    folder = save_tiny_model(tmp_path / "model", tied=tied)
    engine = engine_of(world, folder, zero_stage=stage, dtype=dtype, weight_decay=0.1)
    losses(engine, 2)
    engine.save(tmp_path)
    exported, expected = dict(checkpoint_tensors(tmp_path, folder)), weights_of(engine)
    assert exported.keys() == expected.keys()
    for name, tensor in expected.items():
        assert exported[name].dtype == tensor.dtype
        assert torch.equal(exported[name], tensor), name
