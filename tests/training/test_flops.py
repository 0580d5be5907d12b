"""Operations of a pass: by hand, and against torch's own count of what it multiplies."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tiny_policy import random_batch, tiny_config, tiny_model
from torch.utils.flop_counter import FlopCounterMode

from llamarl_hpc.batching.packing import MicroBatch, micro_batches_of_rank, token_weights
from llamarl_hpc.placement import World
from llamarl_hpc.training.engine import TrainerEngine
from llamarl_hpc.training.flops import pass_flops
from llamarl_hpc.training.lora import add_adapters
from llamarl_hpc.training.memory import ModelShape
from llamarl_hpc.training.policy import PolicyModel, forward_inputs
from llamarl_hpc.types import TrainBatch

SHAPE = ModelShape.of(tiny_model().config.to_dict())
LORA = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj"]}


def packed(batch: TrainBatch, *, budget: int = 4096, share_prompt: bool = True) -> list[MicroBatch]:
    weights = token_weights(batch, aggregation="token-mean", max_completion_length=16)
    return micro_batches_of_rank(
        batch,
        weights,
        rank=0,
        num_ranks=1,
        micro_batch_tokens=budget,
        share_prompt=share_prompt,
    )


def test_a_row_by_hand() -> None:
    batch = random_batch(num_groups=1, num_generations=2)
    prompt = int(batch.prompt_lengths[0])
    first, second = (int(n) for n in batch.completion_lengths)
    (micro_batch,) = packed(batch)
    # width 64, inner 128, 4 heads of 16 with 2 of keys, 2 layers, 512 tokens of vocabulary
    matrices = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128)
    tokens = prompt + first - 1 + second - 1
    pairs = sum(range(1, prompt + 1))
    pairs += sum(range(prompt + 1, prompt + first)) + sum(range(prompt + 1, prompt + second))
    expected = 2 * matrices * tokens + 2 * 512 * 64 * (first + second) + 2 * 4 * 64 * pairs
    assert pass_flops(SHAPE, micro_batch, lora=None, backward=False) == expected
    assert pass_flops(SHAPE, micro_batch, lora=None, backward=True) == 3 * expected


@pytest.mark.parametrize("lora", [None, LORA])
def test_matrix_products_are_those_that_torch_counts(lora: dict[str, Any] | None) -> None:
    config = tiny_config(lora=lora).model.lora
    causal_lm = tiny_model()
    if config is not None:
        add_adapters(causal_lm, config, seed=0)
    policy = PolicyModel(causal_lm, logprob_chunk_tokens=4096)
    batch = random_batch(num_groups=1, num_generations=1)
    (micro_batch,) = packed(batch)
    with FlopCounterMode(display=False) as counter:
        logprobs, _ = policy(**forward_inputs(micro_batch, temperature=1.0, device="cpu"))
        logprobs.sum().backward()
    counted: Counter[str] = Counter()
    for operator, number in counter.get_flop_counts()["Global"].items():
        counted["attention" if "attention" in str(operator) else "products"] += number
    found = pass_flops(SHAPE, micro_batch, lora=config, backward=True)
    scores = 3 * 4 * 2 * 64 * sum(range(1, micro_batch.num_tokens + 1))
    # with LoRA nothing is passed on below the first adapter: not through q, k and v of layer 0
    not_passed_on = 0 if lora is None else 2 * (64 * 64 + 2 * 64 * 32 + 4 * 64)
    assert found - scores - not_passed_on * micro_batch.num_tokens == counted["products"]


def test_a_step_counts_what_all_micro_batches_computed(world: World, model_folder: Path) -> None:
    batch = random_batch()
    config = tiny_config(peak_tflops=2.0)
    metrics = TrainerEngine(config, world, model_folder).train_step(batch).metrics
    needed = sum(pass_flops(SHAPE, m, lora=None, backward=True) for m in packed(batch, budget=128))
    done = metrics["perf/tflops"] * metrics["time/train"] * 1e12
    assert done == pytest.approx(needed, rel=1e-9)
    assert metrics["perf/mfu"] == metrics["perf/tflops"] / 2.0
    small = packed(batch, budget=8, share_prompt=False)
    apart = sum(pass_flops(SHAPE, m, lora=None, backward=True) for m in small)
    assert apart > needed  # the prompts once more for each completion


def test_no_peak_no_utilisation(world: World, model_folder: Path) -> None:
    silent = TrainerEngine(tiny_config(), world, model_folder).train_step(random_batch()).metrics
    assert "perf/mfu" not in silent and silent["perf/tflops"] > 0.0
