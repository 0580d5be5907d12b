"""Attention of rows with a shared prompt on CPUs: only the blocks that anybody looks at.

torch's CPU kernel computes every pair of a masked row and throws away what the mask hides, which in
a row of many completions is most of it. Here the prompts of a micro-batch are one causal call, and
completions of similar length are one call each, over their prompt and themselves:

              prompt  c1  c2  c3
    prompt      1
    c1          2     2
    c2          2         2
    c3          3             3      (shorter than three quarters of c1: a call of its own)

Elsewhere, and where this would save nothing, attention is transformers' own over the mask.

Letters: B rows, L padded row length, H heads, D their width, C completions of a call, M the
longest of them, P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from llamarl_hpc.batching.packing import PROMPT_SEGMENT
from llamarl_hpc.types import Array

NAME = "llamarl_segments"  # under which transformers finds `attend`
_SIMILAR = 0.75  # shortest over longest completion of a call
# What takes as long as so many pairs of query and key: a call by itself, and to bring a key and a
# value there and their gradients back. Measured with 9 heads of 64 on an AMD EPYC.
_CALL_PAIRS = 4096
_KEY_PAIRS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Completions that are computed in one call."""

    queries: Tensor  # int64 [C * M], into the flattened [B * L]
    keys: Tensor  # int64 [C * (P + M)], likewise
    mask: Tensor  # bool [C, 1, M, P + M]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """How a micro-batch is cut."""

    prompt_length: int  # of the longest prompt; in other rows the rest is not looked at
    blocks: list[Block]
    order: Tensor  # int64 [B * L], where the result of a position lies: in prompts, then blocks


@dataclass(frozen=True, slots=True)
class _Completion:
    row: int
    start: int
    length: int


def cut(segment_ids: Tensor) -> Segments | None:
    """The calls for `segment_ids` [B, L], on the CPU; None where one masked call is cheaper."""
    ids = segment_ids.numpy()
    num_rows, width = ids.shape
    prompts: Array = (ids == PROMPT_SEGMENT).sum(axis=1)
    longest = int(prompts.max())
    calls = list(_similar(_completions(ids)))
    pairs = num_rows * longest**2
    for call in calls:
        num_keys = len(call) * (longest + call[0].length)
        pairs += num_keys * (call[0].length + _KEY_PAIRS) + _CALL_PAIRS
    if pairs >= num_rows * width**2:
        return None
    order: Array = np.zeros(num_rows * width, dtype=np.int64)  # padding: any result will do
    for row, prompt in enumerate(prompts.tolist()):
        order[row * width : row * width + prompt] = row * longest + np.arange(prompt)
    blocks, done = [], num_rows * longest
    for call in calls:
        blocks.append(_block(call, prompts, width))
        size = call[0].length
        for completion in call:
            at = completion.row * width + completion.start
            order[at : at + completion.length] = done + np.arange(completion.length)
            done += size
    return Segments(prompt_length=longest, blocks=blocks, order=torch.from_numpy(order))


def _completions(ids: Array) -> Iterator[_Completion]:
    for row, segments in enumerate(ids):
        numbers, starts, lengths = np.unique(segments, return_index=True, return_counts=True)
        for number, start, length in zip(numbers, starts, lengths, strict=True):
            if number > PROMPT_SEGMENT:
                yield _Completion(row, int(start), int(length))


def _similar(completions: Iterator[_Completion]) -> Iterator[list[_Completion]]:
    """The completions by calls, the longest first."""
    call: list[_Completion] = []
    for completion in sorted(completions, key=lambda c: (-c.length, c.row, c.start)):
        if call and completion.length < _SIMILAR * call[0].length:
            yield call
            call = []
        call.append(completion)
    if call:
        yield call


def _block(call: list[_Completion], prompts: Array, width: int) -> Block:
    size, longest = call[0].length, int(max(prompts[c.row] for c in call))
    causal = np.tril(np.ones((size, size), dtype=bool))
    queries: Array = np.zeros((len(call), size), dtype=np.int64)
    keys: Array = np.zeros((len(call), longest + size), dtype=np.int64)
    mask: Array = np.zeros((len(call), 1, size, longest + size), dtype=bool)
    for i, c in enumerate(call):
        first, prompt = c.row * width, int(prompts[c.row])
        # Short of the longest of the call: the last token again, whose result nobody takes.
        queries[i] = first + c.start + np.minimum(np.arange(size), c.length - 1)
        keys[i] = first
        keys[i, :prompt] += np.arange(prompt)
        keys[i, longest:] = queries[i]
        mask[i, 0, :, :prompt] = True
        mask[i, 0, :, longest:] = causal
    return Block(
        queries=torch.from_numpy(queries.reshape(-1)),
        keys=torch.from_numpy(keys.reshape(-1)),
        mask=torch.from_numpy(mask),
    )


def register() -> None:
    """Make `attend` known to transformers; plain rows get the masks of its `sdpa`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: [B, H, L, D] each -> [B, L, H, D]."""
    if segments is None or any(
        others.get(name) is not None for name in ("softcap", "position_bias")
    ):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
        return result
    options: dict[str, Any] = {
        "scale": scaling,
        "dropout_p": dropout,
        "enable_gqa": key.shape[1] != query.shape[1],
    }
    prompt = segments.prompt_length
    prompts = F.scaled_dot_product_attention(
        query[:, :, :prompt], key[:, :, :prompt], value[:, :, :prompt], is_causal=True, **options
    )
    results = [_tokens(prompts)]
    queries, keys, values = _tokens(query), _tokens(key), _tokens(value)
    for block in segments.blocks:
        rows = block.mask.shape[0]
        part = F.scaled_dot_product_attention(
            _rows(queries, block.queries, rows),
            _rows(keys, block.keys, rows),
            _rows(values, block.keys, rows),
            attn_mask=block.mask,
            **options,
        )
        results.append(_tokens(part))
    output = torch.cat(results).index_select(0, segments.order)
    return output.view(query.shape[0], query.shape[2], *output.shape[1:]), None


def _tokens(heads: Tensor) -> Tensor:
    """[B, H, L, D] -> [B * L, H, D]."""
    return heads.transpose(1, 2).flatten(0, 1)


def _rows(tokens: Tensor, index: Tensor, rows: int) -> Tensor:
    """The tokens at `index`, as [rows, H, length, D]."""
    return tokens.index_select(0, index).view(rows, -1, *tokens.shape[1:]).transpose(1, 2)
