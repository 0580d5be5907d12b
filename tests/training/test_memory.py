"""The memory of a trainer rank, from the configuration: by hand, and against the real packing."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_policy import tiny_model

from llamarl_hpc.batching.packing import micro_batches_of_rank, token_weights
from llamarl_hpc.config.schema import Config
from llamarl_hpc.training.memory import ModelShape, Pack, estimate
from llamarl_hpc.training.memory_probe import made_up_batch

SMOLLM2 = ModelShape(
    vocabulary=49_152,
    width=576,
    inner=1536,
    layers=30,
    query_width=576,
    key_width=192,
    heads=9,
    tied=True,
)
NUM_PARAMETERS = 134_515_008


def config(**blocks: Any) -> Config:
    rollout = {"prompts_per_step": 8, "num_generations": 4}
    rollout |= {"max_prompt_length": 48, "max_completion_length": 64}
    return Config.model_validate({"rollout": rollout} | blocks)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_as_the_model_has_them(tied: bool) -> None:
    model = tiny_model(tied=tied)
    shape = ModelShape.of(model.config.to_dict())
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    assert SMOLLM2.num_parameters == NUM_PARAMETERS


@pytest.mark.parametrize(
    ("trainer", "ranks", "parameters", "gradients", "optimizer"),
    [
        ({"zero_stage": 0}, 1, 4, 4, 8),
        ({"zero_stage": 0, "dtype": "bf16"}, 2, 2, 6, 12),
        ({"zero_stage": 1}, 2, 4, 4, 6),
        ({"zero_stage": 2, "dtype": "bf16"}, 4, 2, 1, 3),
        ({"zero_stage": 3}, 2, 2, 2, 6),
    ],
)
def test_what_zero_divides_is_divided(
    trainer: dict[str, Any], ranks: int, parameters: int, gradients: int, optimizer: int
) -> None:
    """Bytes for each parameter."""
    found = estimate(SMOLLM2, config(trainer=trainer), ranks)
    assert found.parameters == parameters * NUM_PARAMETERS
    assert found.gradients == gradients * NUM_PARAMETERS
    assert found.optimizer == optimizer * NUM_PARAMETERS
    copy = 12 * NUM_PARAMETERS // ranks
    assert found.checkpoint == (copy // 2 if trainer["zero_stage"] == 3 else copy)


def test_only_adapters_have_gradients_and_moments() -> None:
    found = estimate(SMOLLM2, config(model={"lora": {"r": 8}}, trainer={"zero_stage": 0}), 1)
    adapters = 30 * 8 * (2 * (576 + 576) + 2 * (576 + 192))
    assert (found.gradients, found.optimizer) == (4 * adapters, 8 * adapters)
    assert found.parameters == 4 * (NUM_PARAMETERS + adapters)
    whole = estimate(SMOLLM2, config(trainer={"zero_stage": 0}), 1)
    assert whole.logits - found.logits == 4 * 49_152 * 576  # the head is frozen, too


def test_only_several_ranks_gather_parameters() -> None:
    trainer = {"trainer": {"zero_stage": 3}}
    assert estimate(SMOLLM2, config(**trainer), 1).gathered == 0
    assert estimate(SMOLLM2, config(**trainer), 2).gathered == 4 * NUM_PARAMETERS


def test_checkpointing_keeps_one_layer_and_the_inputs_of_all() -> None:
    tokens = {"micro_batch_tokens": 1024, "share_prompt": False}
    whole = estimate(SMOLLM2, config(trainer=tokens), 1).activations
    lean = estimate(SMOLLM2, config(trainer=tokens | {"gradient_checkpointing": True}), 1)
    row = 48 + 64 - 1
    inputs = (1024 // row) * row * 576 * 4 * 30
    assert lean.activations == pytest.approx(whole / 30 + inputs, rel=1e-6)


@pytest.mark.parametrize(
    "trainer",
    [
        {"micro_batch_tokens": 1024},
        {"micro_batch_tokens": 1024, "share_prompt": False},
        {"micro_batch_tokens": 200},
        {"micro_batch_tokens": 16},  # less than a row
        {"micro_batch_tokens": 100_000},  # more than the step has
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_largest_micro_batch_is_the_one_that_packing_makes(
    trainer: dict[str, Any], ranks: int
) -> None:
    settings = config(trainer=trainer)
    batch = made_up_batch(settings, ranks, 512)
    micro_batches = micro_batches_of_rank(
        batch,
        token_weights(batch, aggregation="token-mean", max_completion_length=64),
        rank=0,
        num_ranks=ranks,
        micro_batch_tokens=settings.trainer.micro_batch_tokens,
        share_prompt=settings.trainer.share_prompt,
    )
    largest = max(micro_batches, key=lambda m: m.token_ids.size)
    pack = Pack.of(settings, ranks)
    assert largest.token_ids.shape == (pack.rows, pack.row_tokens)
    assert len(largest.flat_index) == pack.completion_tokens


def test_a_step_needs_less_than_a_step_with_copies() -> None:
    found = estimate(SMOLLM2, config(algorithm={"beta": 0.1}), 1)
    assert found.step_peak < found.peak == sum(found.parts().values())
    assert found.reference == found.parameters
    assert found.weight_sync == 2 * found.parameters  # two slots
