"""Attention by blocks is masked attention: values and gradients, whatever the rows look like."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_policy import assert_same, compute, policy64
from tiny_policy import random_batch
from torch import Tensor
from torch.nn import functional as F

from llamarl_hpc.training import segment_attention
from llamarl_hpc.training.policy import attention_mask


def segment_ids(rows: list[tuple[int, list[int]]]) -> Tensor:
    """int64 [B, L] of rows given as (prompt, completions) lengths."""
    width = max(prompt + sum(lengths) for prompt, lengths in rows)
    ids = np.full((len(rows), width), -1, dtype=np.int64)
    for row, (prompt, lengths) in zip(ids, rows, strict=True):
        segments = np.repeat(np.arange(len(lengths) + 1), [prompt, *lengths])
        row[: len(segments)] = segments
    return torch.from_numpy(ids)


def no_call_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_attention, "_CALL_PAIRS", -(1 << 20))


@pytest.mark.parametrize(
    "rows",
    [
        [(5, [7, 7, 7])],
        [(5, [7, 7, 7]), (9, [6, 2, 4, 1, 1]), (1, [3, 8])],
        [(20, [1, 0, 2]), (2, [30, 1])],
    ],
)
@pytest.mark.parametrize("key_heads", [4, 2])
def test_blocks_give_what_the_mask_gives(
    monkeypatch: pytest.MonkeyPatch, rows: list[tuple[int, list[int]]], key_heads: int
) -> None:
    no_call_is_too_small(monkeypatch)
    ids = segment_ids(rows)
    segments = segment_attention.cut(ids)
    assert segments is not None
    mask, real = attention_mask(ids), ids >= 0
    draw = torch.Generator().manual_seed(0)

    def inputs(heads: int) -> Tensor:
        shape = (ids.shape[0], heads, ids.shape[1], 8)
        return torch.randn(shape, dtype=torch.float64, generator=draw, requires_grad=True)

    tensors = [inputs(4), inputs(key_heads), inputs(key_heads)]
    ours = segment_attention.attend(None, *tensors, mask, segments=segments, scaling=0.3)[0]
    query, key, value = tensors
    repeated = [t.repeat_interleave(4 // key_heads, dim=1) for t in (key, value)]
    direct = F.scaled_dot_product_attention(query, *repeated, attn_mask=mask, scale=0.3)
    direct = direct.transpose(1, 2)
    torch.testing.assert_close(ours[real], direct[real], rtol=0, atol=1e-14)
    pull = torch.randn(ours.shape, dtype=torch.float64, generator=draw) * real[:, :, None, None]
    expected = torch.autograd.grad((direct * pull).sum(), tensors)
    for mine, theirs in zip(
        torch.autograd.grad((ours * pull).sum(), tensors), expected, strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize("budget", [10_000, 60])
def test_a_policy_with_blocks_has_the_gradients_of_separate_rows(
    monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    no_call_is_too_small(monkeypatch)
    seen: list[int] = []
    cut = segment_attention.cut

    def counted(ids: Tensor) -> Any:
        segments = cut(ids)
        seen.append(0 if segments is None else len(segments.blocks))
        return segments

    monkeypatch.setattr(segment_attention, "cut", counted)
    policy, batch = policy64(), random_batch(num_groups=5)
    shared = compute(policy, batch, share_prompt=True, budget=budget)
    assert max(seen) > 1
    assert_same(shared, compute(policy, batch, share_prompt=False))


def test_short_rows_stay_one_call_and_long_ones_are_cut() -> None:
    assert segment_attention.cut(segment_ids([(8, [5, 5, 5])])) is None
    segments = segment_attention.cut(segment_ids([(50, [60, 58, 60, 20])] * 2))
    assert segments is not None and segments.prompt_length == 50
    # those of 58 and 60 in one call, padded; those of 20 in another
    assert [tuple(block.mask.shape) for block in segments.blocks] == [
        (6, 1, 60, 110),
        (2, 1, 20, 70),
    ]
