"""Deltas give back every bit, pay, or are not made."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch

from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.types import ParameterSpec
from llamarl_hpc.weight_sync.collective.delta import PAYS, Delta, decode, encode, word_bytes
from llamarl_hpc.weight_sync.plan import make_arena, make_plan


def raw(num_bytes: int, rng: random.Random) -> torch.Tensor:
    return torch.frombuffer(bytearray(rng.randbytes(num_bytes)), dtype=torch.uint8)


def changed(base: torch.Tensor, words: list[int], size: int) -> torch.Tensor:
    """`base` with these words flipped."""
    new = base.clone()
    for word in words:
        new[word * size : (word + 1) * size] ^= 0xFF
    return new


def assert_comes_back(base: torch.Tensor, new: torch.Tensor, size: int) -> Delta:
    found = encode(new, base, size)
    assert found is not None
    delta, data = found
    assert len(data) == delta.num_bytes <= PAYS * len(new)
    memory = base.clone()
    places, values = decode(delta, data, len(memory))
    memory.view(values.dtype)[places] = values
    assert torch.equal(memory, new)
    return delta


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("seed", range(20))
def test_any_change_comes_back_bit_by_bit(seed: int, size: int) -> None:
    rng = random.Random(seed)
    num_words = rng.randrange(64, 20_000)
    count = rng.randrange(0, num_words // 8)
    words = rng.sample(range(num_words), count)
    base = raw(num_words * size, rng)
    assert assert_comes_back(base, changed(base, words, size), size).num_words == count


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 2040])
def test_gaps_around_the_largest_code_come_back(gap: int) -> None:
    base = raw(8192, random.Random(gap))
    delta = assert_comes_back(base, changed(base, [gap, 2 * gap + 1, 4095], 2), 2)
    assert delta.num_words == 3


def test_three_bytes_travel_for_a_changed_bfloat16() -> None:
    base = torch.randn(100_000).to(torch.bfloat16)
    new = base.clone()
    new[::100] *= 1.5
    delta = assert_comes_back(base.view(torch.uint8), new.view(torch.uint8), 2)
    assert delta.num_bytes == 3 * 1000


def test_words_are_compared_as_bits() -> None:
    base = torch.full((64,), float("nan"), dtype=torch.bfloat16)
    base[3] = 0.0
    new = base.clone()
    new[3] = -0.0
    delta = assert_comes_back(base.view(torch.uint8), new.view(torch.uint8), 2)
    assert delta.num_words == 1


def test_nothing_changed_is_a_byte_since_broadcasts_need_one() -> None:
    base = raw(4096, random.Random(0))
    assert assert_comes_back(base, base.clone(), 2).num_bytes == 1


def test_what_has_changed_by_more_than_a_third_is_not_worth_a_delta() -> None:
    base = torch.zeros(3000, dtype=torch.int16)
    for count, pays in ((1000, True), (1001, False), (3000, False)):
        new = base.clone()
        new[:count] = 1
        assert (encode(new.view(torch.uint8), base.view(torch.uint8), 2) is not None) == pays


def test_a_delta_that_does_not_fit_is_refused() -> None:
    base = raw(4096, random.Random(1))
    found = encode(changed(base, [5, 2000], 2), base, 2)
    assert found is not None
    delta, data = found
    with pytest.raises(WeightSyncError, match="a delta changes word 2000 of 1000"):
        decode(delta, data, 2000)
    with pytest.raises(WeightSyncError, match="of 3 changed words has the places of 2"):
        decode(msgspec.structs.replace(delta, num_words=3), data, 4096)


def test_a_word_is_two_bytes_or_one_where_bytes_travel() -> None:
    for dtypes, size in ((["float32", "bfloat16"], 2), (["int8", "float32"], 1)):
        specs = [ParameterSpec(name=d, shape=(5,), dtype=d) for d in dtypes]
        owned = [dict.fromkeys(dtypes)]
        assert word_bytes(make_plan(make_arena(specs), owned, 1 << 20)) == size
