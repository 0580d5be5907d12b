"""Which part of every weight a rank keeps: together they are the weight, no row of it twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.generation.native.architecture import Architecture
from llamarl_hpc.generation.native.sharding import Share, cut, part_of, parts_of

# SmolLM2-135M: 9 heads of queries over 3 of keys and values
SMOLLM2 = Architecture(
    hidden_size=576,
    intermediate_size=1536,
    num_layers=2,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    norm_eps=1e-5,
    tied=False,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    qk_norm=True,
)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("size", [8, 9, 96, 97, 1536, 49157])
def test_cuts_cover_everything_once_and_are_even(size: int, num_ranks: int) -> None:
    spans = [cut(size, rank, num_ranks) for rank in range(num_ranks)]
    assert [row for start, end in spans for row in range(start, end)] == list(range(size))
    lengths = [end - start for start, end in spans]
    assert min(lengths) >= 1
    assert max(lengths) - min(lengths) <= 16  # two cuts, each moved to a multiple of 8


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_the_parts_of_all_ranks_are_the_whole_weights(num_ranks: int, tied: bool) -> None:
    arch = replace(SMOLLM2, tied=tied)
    of_rank = [
        {part.name: part for part in parts_of(arch, Share.of(arch, rank, num_ranks))}
        for rank in range(num_ranks)
    ]
    assert ("lm_head.weight" in of_rank[0]) is not tied
    for name, first in of_rank[0].items():
        generator = torch.Generator().manual_seed(len(name))
        whole = torch.randint(0, 1 << 30, first.shape, generator=generator)
        parts = [part_of(whole, parts[name]) for parts in of_rank]
        is_summed = name.endswith(("o_proj.bias", "down_proj.bias"))
        if is_summed or "norm" in name or "embed" in name:
            assert all(torch.equal(part, whole) for part in parts), name
        else:
            assert torch.equal(torch.cat(parts, dim=first.dim), whole), name
            assert first.dim == (1 if "o_proj" in name or "down_proj" in name else 0)


def test_query_heads_stay_with_the_heads_that_they_read() -> None:
    shares = [Share.of(SMOLLM2, rank, 2) for rank in range(2)]
    assert [share.kv_heads for share in shares] == [(0, 1), (1, 3)]
    assert [share.heads for share in shares] == [(0, 3), (3, 9)]
    local = shares[1].apply(SMOLLM2)
    assert (local.num_heads, local.num_kv_heads) == (6, 2)
    assert (local.hidden_size, local.head_dim) == (576, 64)


def test_a_part_is_taken_as_it_is_and_other_shapes_are_refused() -> None:
    parts = {part.name: part for part in parts_of(SMOLLM2, Share.of(SMOLLM2, 1, 2))}
    part = parts["model.layers.0.self_attn.o_proj.weight"]
    assert part.part_shape == (576, 6 * 64)
    whole = torch.arange(576 * 576).reshape(576, 576)
    mine = part_of(whole, part)
    assert torch.equal(mine, whole[:, 3 * 64 :])
    assert part_of(mine, part) is mine
    with pytest.raises(WeightSyncError, match=r"o_proj.weight came as \[576, 64\], wanted"):
        part_of(whole[:, :64], part)
