"""Quantised matrices: hand-computed values, hard rows, and any slice like the whole."""

from __future__ import annotations

import pytest
import torch

from llamarl_hpc.models import int8
from llamarl_hpc.models.int8 import is_quantised, largest_of_rows, quantise_rows, row_scales


def test_values_are_rounded_to_even_against_the_largest_of_their_row() -> None:
    matrix = torch.tensor(
        [
            [127.0, 0.5, 1.5, -2.5, 126.5],  # scale 1: halves go to the even neighbour
            [-254.0, 1.0, 3.0, 2.0, 0.0],  # scale 2
            [0.1, -0.1, 0.05, 0.0, 0.1],
        ]
    )
    scales = row_scales(largest_of_rows(matrix))
    assert scales.dtype == torch.float32
    assert scales[:2].tolist() == [1.0, 2.0]
    assert scales[2] == torch.tensor(0.1) / 127
    found = quantise_rows(matrix, scales)
    assert found.dtype == torch.int8
    assert found.tolist() == [
        [127, 0, 2, -2, 126],
        [-127, 0, 2, 1, 0],
        [127, -127, 64, 0, 127],  # 0.05 / (0.1 / 127) is 63.5
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [0.0, 1e-40, 1.4e-45, 1e-37, 2e-36, 1e30, 3e38])
def test_rows_of_any_size_give_finite_weights(dtype: torch.dtype, value: float) -> None:
    matrix = torch.tensor([[value, -value, 0.0]]).to(dtype)
    scales = row_scales(largest_of_rows(matrix))
    found = quantise_rows(matrix, scales)
    assert torch.isfinite(scales).all() and (scales >= torch.finfo(torch.float32).tiny).all()
    error = (found.double() * scales.double().unsqueeze(1) - matrix.double()).abs()
    assert (error <= scales.double() * 0.5000001).all()
    if value < 1e-36:  # the scale would not be a normal number
        assert found.tolist() == [[0, 0, 0]]
    else:
        assert found.tolist() == [[127, -127, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_error_is_half_a_scale_and_slices_equal_the_whole(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = (torch.randn(70, 33, generator=generator) * 0.3).to(dtype)
    matrix[5] = 0
    scales = row_scales(largest_of_rows(matrix))
    whole = quantise_rows(matrix, scales)
    restored = whole.float() * scales.unsqueeze(1)
    assert ((restored - matrix.float()).abs() <= scales.unsqueeze(1) * 0.50001).all()
    assert whole.abs().amax(dim=1).tolist() == [0 if row == 5 else 127 for row in range(70)]
    assert torch.equal(quantise_rows(matrix[9:40, 7:21], scales[9:40]), whole[9:40, 7:21])
    monkeypatch.setattr(int8, "_CPU_BLOCK", 100)
    assert torch.equal(quantise_rows(matrix, scales), whole)


def test_matrices_of_layers_are_quantised_and_nothing_else() -> None:
    kinds = {
        "model.layers.0.self_attn.q_proj.weight": (8, 4),
        "model.layers.11.mlp.down_proj.weight": (4, 8),
        "model.embed_tokens.weight": (16, 4),
        "lm_head.weight": (16, 4),
        "model.layers.0.self_attn.q_proj.bias": (8,),
        "model.layers.0.input_layernorm.weight": (4,),
        "model.norm.weight": (4,),
    }
    assert [is_quantised(*item) for item in kinds.items()] == [True] * 2 + [False] * 5
    tensors = {name: torch.ones(shape) for name, shape in kinds.items()}
    found = dict(int8.quantised(tensors.items()))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert list(found)[:2] == [name, f"{name}_scale"] and len(found) == 9
    assert (found[name] == 127).all() and found[f"{name}_scale"].shape == (8,)
    assert all(found[n] is tensors[n] for n in list(kinds)[2:])
