"""Rotary tables are the trainer's to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llamarl_hpc.generation.native.rotary import rotary_tables

_SCALED = {"factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10_000.0},
        {"rope_type": "default", "rope_theta": 500_000.0},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", **_SCALED, **_LLAMA3},
        {"rope_type": "yarn", **_SCALED},
    ],
    ids=lambda rope: f"{rope['rope_type']}-{rope.get('rope_theta', '')}",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tables_equal_those_of_the_trainers_model(
    rope: dict[str, Any], dtype: torch.dtype
) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=32,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 10_000.0, **rope},
    )
    wanted = LlamaRotaryEmbedding(config)(torch.empty(0, dtype=dtype), torch.arange(256)[None])
    found = rotary_tables(config, 256, dtype, torch.device("cpu"))
    for table, other in zip(found, wanted, strict=True):
        assert table.dtype == dtype
        assert torch.equal(table, other[0])
