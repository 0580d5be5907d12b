"""LoRA: adapters are trained, whole merged weights leave the trainer; peft agrees."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tiny_policy import random_batch, tiny_config

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.models.load import load_trainer_model
from llamarl_hpc.placement import World
from llamarl_hpc.training.consolidate import checkpoint_adapters, checkpoint_tensors
from llamarl_hpc.training.engine import TrainerEngine
from llamarl_hpc.training.lora import save_adapter
from llamarl_hpc.weight_sync.quantised_source import QuantisedSource

LORA = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def engine_of(world: World, folder: Path, *, stage: int = 1, dtype: str = "fp32") -> TrainerEngine:
    config = tiny_config(lora=LORA, zero_stage=stage, dtype=dtype, learning_rate=1e-2)
    return TrainerEngine(config, world, folder)


def steps(engine: TrainerEngine, number: int, first: int = 0) -> list[float]:
    batches = [random_batch(seed=s, step=s) for s in range(first, first + number)]
    return [engine.train_step(batch).metrics["loss"] for batch in batches]


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "fp32"), (1, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")]
)
def test_merged_weights_leave_the_trainer_whole_and_frozen_ones_as_they_were(
    world: World, model_folder: Path, stage: int, dtype: str
) -> None:
    before = dict(load_trainer_model(model_folder, dtype).named_parameters())
    engine = engine_of(world, model_folder, stage=stage, dtype=dtype)
    assert [s.name for s in engine.parameter_specs()] == list(before)
    for name, tensor in engine.export_state_dict():  # B is zero at first
        assert torch.equal(tensor, before[name])
    steps(engine, 3)
    merged = dict(engine.export_state_dict())
    changed = {name for name, tensor in merged.items() if not torch.equal(tensor, before[name])}
    assert changed == {n for n in before if n.split(".")[-2] in LORA["target_modules"]}  # type: ignore[operator]
    for spec in engine.parameter_specs():
        flat = merged[spec.name].flatten()
        owned = engine.owned_range(spec.name) or (0, spec.numel)
        torch.testing.assert_close(engine.read(spec.name, *owned), flat, rtol=0, atol=1e-7)
        middle = engine.read(spec.name, 5, 9)  # cuts rows anywhere
        torch.testing.assert_close(middle, flat[5:9], rtol=0, atol=1e-7)


@pytest.mark.parametrize(("stage", "dtype"), [(1, "fp32"), (3, "bf16")])
def test_merged_weights_leave_quantised(
    world: World, model_folder: Path, stage: int, dtype: str
) -> None:
    engine = engine_of(world, model_folder, stage=stage, dtype=dtype)
    source = QuantisedSource(engine, world)
    rounding = 2**-8 if dtype == "bf16" else 1e-6  # products of other sizes may round otherwise
    for number in range(2):
        steps(engine, 1, first=number)
        source.measure()
        for name, merged in engine.export_state_dict():
            if f"{name}_scale" not in {spec.name for spec in source.parameter_specs()}:
                assert torch.equal(source.read(name, 0, merged.numel()), merged.flatten())
                continue
            scales = source.read(f"{name}_scale", 0, len(merged)).unsqueeze(1)
            restored = source.read(name, 0, merged.numel()).view(merged.shape) * scales
            size = merged.float().abs()
            assert ((restored - merged.float()).abs() <= 0.5001 * scales + rounding * size).all()
            largest = size.amax(dim=1)
            torch.testing.assert_close(127 * scales.squeeze(1), largest, rtol=rounding, atol=0)


def test_the_loss_falls_and_every_stage_makes_the_same_steps(
    world: World, model_folder: Path
) -> None:
    config = tiny_config(lora=LORA, algorithm={"loss_type": "reinforce"}, learning_rate=1e-2)
    engine = TrainerEngine(config, world, model_folder)
    batch = random_batch()
    batch = msgspec.structs.replace(batch, advantages=np.ones_like(batch.advantages))
    falling = [engine.train_step(batch).metrics["loss"] for _ in range(6)]
    assert falling[-1] < falling[0] - 0.3
    reference = steps(engine_of(world, model_folder, stage=0), 3)
    for stage in (1, 2, 3):
        made = steps(engine_of(world, model_folder, stage=stage), 3)
        assert made == pytest.approx(reference, rel=1e-5)


def test_a_checkpoint_holds_adapters_only_and_is_continued_exactly(
    world: World, model_folder: Path, tmp_path: Path
) -> None:
    engine = engine_of(world, model_folder)
    steps(engine, 2)
    engine.save(tmp_path)
    size = (tmp_path / "zero" / "shard_00000.safetensors").stat().st_size
    trained = sum(t.numel() for t in checkpoint_adapters(tmp_path)[1].values())
    assert 12 * trained < size < 12 * trained + 8000
    undisturbed = steps(engine, 2, first=2)
    back = engine_of(world, model_folder)
    back.load(tmp_path)
    assert steps(back, 2, first=2) == undisturbed
    with pytest.raises(ConfigError, match=r"holds model\.embed_tokens\.weight with shape None"):
        TrainerEngine(tiny_config(), world, model_folder).load(tmp_path)


def test_peft_loads_the_exported_adapter_and_merges_it_to_the_same_weights(
    world: World, model_folder: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    engine = engine_of(world, model_folder)
    steps(engine, 3)
    engine.save(tmp_path)
    exported = dict(checkpoint_tensors(tmp_path, model_folder))
    for name, tensor in engine.export_state_dict():
        assert torch.equal(tensor, exported[name])
    lora, trained = checkpoint_adapters(tmp_path)
    save_adapter(trained, lora, str(model_folder), tmp_path / "adapter")
    base = load_trainer_model(model_folder)
    model = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).merge_and_unload()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(exported[name], parameter.data, rtol=0, atol=1e-7)


def test_layers_that_the_model_does_not_have_are_named(world: World, model_folder: Path) -> None:
    config = tiny_config(lora={"target_modules": ["q_proj", "c_attn"]})
    with pytest.raises(ConfigError, match=r"names c_attn, but .* are called down_proj"):
        TrainerEngine(config, world, model_folder)
