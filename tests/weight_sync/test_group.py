"""Broadcasts under way are bounded in number and in bytes, never none; what goes wrong is said."""

from __future__ import annotations

import random

import pytest

from llamarl_hpc.weight_sync.collective.group import WINDOW, WINDOW_SMALL, Window, reason


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


def test_of_an_error_of_gloo_what_happened_is_kept() -> None:
    text = (
        "[/build/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.1]:519: Connection reset by "
        "peer. This is typically caused by a remote worker hanging. Check its logs"
    )
    assert reason(RuntimeError(text)) == "Read error [10.0.0.1]:519: Connection reset by peer"
    assert reason(RuntimeError("no such host\nException raised from x.cpp")) == "no such host"
