"""A random two-layer Llama and random batches: a whole DeepSpeed run takes a second or two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from llamarl_hpc.config.schema import Config
from llamarl_hpc.types import TrainBatch

VOCABULARY = 512


def tiny_model(*, tied: bool = True, seed: int = 0, **overrides: Any) -> Any:
    """LlamaForCausalLM, float32, weights large enough to be far from uniform."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "initializer_range": 0.08,
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **overrides}))


def save_tiny_model(folder: Path, *, tied: bool = True) -> Path:
    tiny_model(tied=tied).save_pretrained(folder)
    return folder


def tiny_config(**trainer: Any) -> Config:
    """Defaults that move weights visibly in a step; `trainer` overrides its block."""
    settings = {"learning_rate": 1e-3, "micro_batch_tokens": 128, "logprob_chunk_tokens": 16}
    algorithm, lora = trainer.pop("algorithm", {}), trainer.pop("lora", None)
    return Config.model_validate(
        {
            "trainer": {**settings, **trainer},
            "algorithm": algorithm,
            "model": {"lora": lora},
            "rollout": {"max_completion_length": 16},
        }
    )


def random_batch(
    *,
    seed: int = 0,
    num_groups: int = 4,
    num_generations: int = 4,
    step: int = 0,
    temperature: float = 1.0,
    max_length: int = 12,
) -> TrainBatch:
    """Ragged groups with plausible log-probs, both signs of advantage and some masked tokens."""
    rng = np.random.default_rng(seed)
    prompt_lengths = rng.integers(3, 20, num_groups)
    lengths = rng.integers(1, max_length + 1, num_groups * num_generations)
    num_tokens = int(lengths.sum())
    return TrainBatch(
        step=step,
        temperature=temperature,
        prompt_ids=rng.integers(0, VOCABULARY, prompt_lengths.sum()).astype(np.int32),
        prompt_lengths=prompt_lengths.astype(np.int32),
        group_index=np.repeat(np.arange(num_groups), num_generations).astype(np.int32),
        completion_ids=rng.integers(0, VOCABULARY, num_tokens).astype(np.int32),
        completion_lengths=lengths.astype(np.int32),
        logprobs=rng.normal(-6.5, 0.8, num_tokens).astype(np.float32),
        loss_mask=rng.random(num_tokens) < 0.9,
        advantages=rng.normal(0.0, 1.0, num_groups * num_generations).astype(np.float32),
        logprobs_reference=rng.normal(-6.5, 0.8, num_tokens).astype(np.float32),
        lags=rng.integers(0, 4, num_tokens).astype(np.int32),
    )
