"""What is summed in each mode: all of it, a sixteenth that moves with the version, nothing."""

from __future__ import annotations

import pytest
import torch
from sync_setup import SPECS, weights

from llamarl_hpc.types import ParameterSpec
from llamarl_hpc.weight_sync.checksum import version_checksum
from llamarl_hpc.weight_sync.plan import make_arena, make_plan
from llamarl_hpc.weight_sync.verification import (
    BLOCK_BYTES,
    PERIOD,
    checksum_of,
    piece_sum,
    summed_ranges,
)

LARGE = [
    ParameterSpec(name="a", shape=(9 * BLOCK_BYTES + 5,), dtype="bfloat16"),
    ParameterSpec(name="b", shape=(3,), dtype="float32"),
    ParameterSpec(name="c", shape=(7 * BLOCK_BYTES // 4 + 1,), dtype="float32"),
]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_sample_is_a_sixteenth_and_sixteen_versions_cover_every_element_once(
    num_ranks: int,
) -> None:
    arena = make_arena(LARGE)
    owned = [{spec.name: None for spec in LARGE}] * num_ranks
    pieces = [p for bucket in make_plan(arena, owned, 3 << 20) for p in bucket.pieces]
    seen: dict[str, list[tuple[int, int]]] = {spec.name: [] for spec in LARGE}
    for version in range(5, 5 + PERIOD):
        num_bytes = 0
        for piece in pieces:
            for start, end in summed_ranges("sampled", version, arena, piece):
                assert piece.start <= start < end <= piece.end
                seen[piece.name].append((start, end))
                num_bytes += (end - start) * (2 if piece.dtype == "bfloat16" else 4)
        assert num_bytes <= arena.num_bytes / PERIOD + 2 * BLOCK_BYTES
    for spec in LARGE:
        at = 0
        for start, end in sorted(seen[spec.name]):
            assert start == at
            at = end
        assert at == spec.numel


def test_sums_of_pieces_add_up_to_the_checksum_of_the_version() -> None:
    arena, tensors = make_arena(SPECS), weights(3)
    owned = [{spec.name: None for spec in SPECS}] * 2

    def checksum(verify: str, bucket_bytes: int, num_ranks: int) -> str:
        plan = make_plan(arena, owned[:num_ranks], bucket_bytes)
        sums = [
            [
                piece_sum(
                    verify,  # type: ignore[arg-type]
                    3,
                    arena,
                    piece,
                    tensors[piece.name].reshape(-1)[piece.start : piece.end].view(torch.uint8),
                )
                for piece in bucket.pieces
            ]
            for bucket in plan
        ]
        return checksum_of(verify, arena, sums)  # type: ignore[arg-type]

    assert checksum("full", 1 << 20, 2) == version_checksum(SPECS, tensors)
    assert checksum("sampled", 1 << 16, 1) == checksum("sampled", 1 << 22, 2)
    assert checksum("off", 1 << 20, 1) == ""
