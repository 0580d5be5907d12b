"""The endless walk: each prompt once an epoch, the same order after a resume."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.prompts.cursor import PromptCursor, epoch_order
from llamarl_hpc.prompts.dataset import PromptSet
from llamarl_hpc.types import Prompt


def prompts(number: int) -> PromptSet:
    return PromptSet(
        [
            Prompt(
                prompt_id=f"p{i}",
                epoch=0,
                text=f"t{i}",
                token_ids=np.array([i], np.int32),
                columns={"answer": i},
            )
            for i in range(number)
        ]
    )


def ids(cursor: PromptCursor, number: int) -> list[tuple[int, str]]:
    return [(p.epoch, p.prompt_id) for p in (cursor.next() for _ in range(number))]


def test_every_epoch_asks_every_prompt_once_in_a_new_order() -> None:
    walk = ids(PromptCursor(prompts(100), seed=1), 300)
    epochs = [walk[0:100], walk[100:200], walk[200:300]]
    for number, epoch in enumerate(epochs):
        assert {e for e, _ in epoch} == {number}
        assert set(Counter(p for _, p in epoch).values()) == {1}
    orders = {tuple(p for _, p in epoch) for epoch in epochs}
    assert len(orders) == 3


def test_without_shuffle_the_order_is_the_files() -> None:
    walk = ids(PromptCursor(prompts(3), seed=1, shuffle=False), 5)
    assert walk == [(0, "p0"), (0, "p1"), (0, "p2"), (1, "p0"), (1, "p1")]


def test_a_position_has_one_prompt_however_it_is_reached() -> None:
    data = prompts(17)
    walk = ids(PromptCursor(data, seed=5), 60)
    other = PromptCursor(data, seed=5)
    for ticket in reversed(range(60)):
        prompt = other.prompt_at(ticket)
        assert (prompt.epoch, prompt.prompt_id) == walk[ticket]
    assert other.position == 0


def test_a_restored_cursor_goes_on_where_the_other_was() -> None:
    data = prompts(10)
    cursor = PromptCursor(data, seed=2)
    ids(cursor, 14)
    state = json.loads(json.dumps(cursor.state()))
    expected = ids(cursor, 30)
    resumed = PromptCursor(data, seed=2)
    resumed.restore(state)
    assert ids(resumed, 30) == expected


def test_changed_data_are_refused_with_the_counts() -> None:
    state = PromptCursor(prompts(100), seed=2).state()
    with pytest.raises(ConfigError, match="100 prompts then, 99 now"):
        PromptCursor(prompts(99), seed=2).restore(state)
    same_size = PromptSet([prompts(101)[i] for i in range(1, 101)])
    with pytest.raises(ConfigError, match="100 prompts then, 100 now, and not the same ones"):
        PromptCursor(same_size, seed=2).restore(state)


def test_another_seed_or_order_is_refused() -> None:
    state = PromptCursor(prompts(10), seed=2).state()
    with pytest.raises(ConfigError, match=r"data\.seed and data\.shuffle were 2 and True"):
        PromptCursor(prompts(10), seed=3).restore(state)
    with pytest.raises(ConfigError, match="and are 2 and False now"):
        PromptCursor(prompts(10), seed=2, shuffle=False).restore(state)


def test_the_order_is_the_same_for_ever() -> None:
    """Recorded once; a change here would change the data order of every resumed run."""
    assert epoch_order(10, 1, 0).tolist() == RECORDED
    assert epoch_order(10, 1, 1).tolist() != RECORDED
    assert epoch_order(10, 2, 0).tolist() != RECORDED


def test_orders_are_even() -> None:
    """Each of 8 indices comes first about equally often over 4000 epochs (500 +- 100)."""
    firsts = Counter(int(epoch_order(8, 3, epoch)[0]) for epoch in range(4000))
    assert len(firsts) == 8 and max(firsts.values()) < 600 and min(firsts.values()) > 400


RECORDED = [3, 5, 2, 4, 1, 9, 0, 6, 8, 7]
