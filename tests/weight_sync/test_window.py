"""How many broadcasts are under way: bounded in number and in bytes, never none."""

from __future__ import annotations

import random

import pytest

from llamarl_hpc.weight_sync.group import WINDOW, WINDOW_SMALL, Window


@pytest.mark.parametrize("seed", range(5))
def test_a_window_bounds_number_and_bytes_and_always_lets_one_through(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 100, 1 << 20, 1 << 26]) for _ in range(300)]
    window, under_way = Window(sizes), list[int]()
    seen = 0
    for number, size in enumerate(sizes):
        while window.is_full(number):
            under_way.pop(0)
            window.finished()
        under_way.append(size)
        assert len(under_way) <= WINDOW_SMALL and sum(under_way) <= WINDOW * max(sizes)
        seen = max(seen, len(under_way))
    assert seen > WINDOW
