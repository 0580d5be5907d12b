"""The checksum: the same for every split, different for every change."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from llamarl_hpc.types import ParameterSpec
from llamarl_hpc.weight_sync.checksum import (
    ROW_BYTES,
    finish,
    piece_checksum,
    version_checksum,
)


def model() -> tuple[list[ParameterSpec], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (300, 130), "b": (3,), "c": (40_000,), "d": (), "e": (0,), "f": (32_768,)}
    dtypes = [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32, torch.float32] * 2
    tensors = {
        name: torch.randn(shape, generator=generator).to(dtype)
        for (name, shape), dtype in zip(shapes.items(), dtypes, strict=False)
    }
    specs = [
        ParameterSpec(name=n, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
        for n, t in tensors.items()
    ]
    return specs, tensors


def random_cuts(rng: random.Random, numel: int) -> list[tuple[int, int]]:
    inner = sorted(rng.sample(range(1, numel), min(rng.randint(0, 4), max(numel - 1, 0))))
    edges = [0, *inner, numel]
    return list(itertools.pairwise(edges))


@pytest.mark.parametrize("seed", range(20))
def test_any_split_in_any_order_adds_up_to_the_same_checksum(seed: int) -> None:
    rng = random.Random(seed)
    specs, tensors = model()
    parts = []
    for spec in specs:
        flat = tensors[spec.name].reshape(-1)
        parts += [piece_checksum(spec.name, s, flat[s:e]) for s, e in random_cuts(rng, spec.numel)]
    rng.shuffle(parts)
    assert finish(specs, parts) == version_checksum(specs, tensors)


def test_the_value_is_fixed_for_ever() -> None:
    """It is compared between attempts and machines; a change of the formula must be noticed."""
    specs = [ParameterSpec(name="w", shape=(20_000,), dtype="float32")]
    assert version_checksum(specs, {"w": torch.arange(20_000.0)}) == "44706a415c8b92ff"


def test_every_single_changed_byte_shows() -> None:
    specs, tensors = model()
    whole = version_checksum(specs, tensors)
    rng = random.Random(1)
    for _ in range(200):
        name = rng.choice("abcdf")
        raw = tensors[name].reshape(-1).view(torch.uint8)
        at, flip = rng.randrange(len(raw)), rng.randint(1, 255)
        raw[at] ^= flip
        assert version_checksum(specs, tensors) != whole
        raw[at] ^= flip
    assert version_checksum(specs, tensors) == whole


def test_moved_swapped_and_negated_values_show() -> None:
    specs, tensors = model()
    whole = version_checksum(specs, tensors)
    flat = tensors["a"].reshape(-1)
    words = flat.clone()
    for changed in (
        words.roll(2),
        torch.cat([words[2:4], words[:2], words[4:]]),
        words.roll(ROW_BYTES // 4),
        -words,
        torch.zeros_like(words),
    ):
        assert version_checksum(specs, {**tensors, "a": changed.view(300, 130)}) != whole
    swapped = {**tensors, "c": tensors["f"], "f": tensors["c"]}
    assert version_checksum(specs, swapped) != whole


def test_names_shapes_and_dtypes_count() -> None:
    values = torch.zeros(6)
    checksums = {
        version_checksum([ParameterSpec(name=n, shape=s, dtype=d)], {n: values})
        for n, s, d in [
            ("w", (6,), "float32"),
            ("w", (2, 3), "float32"),
            ("v", (6,), "float32"),
            ("w", (6,), "float64"),
        ]
    }
    assert len(checksums) == 4
