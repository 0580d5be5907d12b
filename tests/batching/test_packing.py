"""Packing: layouts by hand, every token once, equal numbers of passes, global denominators."""

from __future__ import annotations

from itertools import chain

import msgspec
import numpy as np
import pytest

from llamarl_hpc.batching.packing import (
    MicroBatch,
    micro_batches_of_rank,
    rollouts_with_gradient,
    token_weights,
)
from llamarl_hpc.types import TrainBatch


def make_batch(
    prompts: list[list[int]],
    completions: list[tuple[int, list[int]]],
    *,
    masked: tuple[int, ...] = (),
) -> TrainBatch:
    """Groups by their prompts, rollouts as (group, tokens); `masked` rollouts are not trained."""
    lengths = [len(tokens) for _, tokens in completions]
    num_tokens = sum(lengths)
    return TrainBatch(
        step=0,
        temperature=1.0,
        prompt_ids=np.array(list(chain.from_iterable(prompts)), dtype=np.int32),
        prompt_lengths=np.array([len(p) for p in prompts], dtype=np.int32),
        group_index=np.array([group for group, _ in completions], dtype=np.int32),
        completion_ids=np.array([t for _, tokens in completions for t in tokens], dtype=np.int32),
        completion_lengths=np.array(lengths, dtype=np.int32),
        logprobs=-np.arange(num_tokens, dtype=np.float32),
        loss_mask=np.repeat([i not in masked for i in range(len(lengths))], lengths),
        advantages=np.arange(len(lengths), dtype=np.float32),
    )


def ragged_batch(seed: int, num_groups: int = 7, num_generations: int = 5) -> TrainBatch:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(1, 99, rng.integers(1, 30)).tolist() for _ in range(num_groups)]
    groups = rng.permutation(np.repeat(np.arange(num_groups), num_generations))
    rows = [(int(g), rng.integers(1, 99, rng.integers(1, 20)).tolist()) for g in groups]
    return make_batch(prompts, rows)


def pack(
    batch: TrainBatch, *, num_ranks: int = 1, budget: int = 64, share_prompt: bool = True
) -> list[list[MicroBatch]]:
    weights = token_weights(batch, aggregation="token-mean", max_completion_length=16)
    return [
        micro_batches_of_rank(
            batch,
            weights,
            rank=rank,
            num_ranks=num_ranks,
            micro_batch_tokens=budget,
            share_prompt=share_prompt,
        )
        for rank in range(num_ranks)
    ]


def test_a_shared_prompt_row_by_hand() -> None:
    batch = make_batch([[7, 8, 9]], [(0, [1, 2]), (0, [3]), (0, [4, 5, 6])])
    ((micro_batch,),) = pack(batch)
    assert micro_batch.token_ids.tolist() == [[7, 8, 9, 1, 4, 5]]  # without last tokens
    assert micro_batch.position_ids.tolist() == [[0, 1, 2, 3, 3, 4]]
    assert micro_batch.segment_ids.tolist() == [[0, 0, 0, 1, 3, 3]]
    # the first token of each completion is predicted by the last of the prompt, at 2
    assert micro_batch.gather_index.tolist() == [2, 3, 2, 2, 4, 5]
    assert micro_batch.target_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert micro_batch.advantages.tolist() == [0, 0, 1, 2, 2, 2]
    assert micro_batch.logprobs.tolist() == [0, -1, -2, -3, -4, -5]
    assert micro_batch.weights.tolist() == [1 / 6] * 6
    assert micro_batch.flat_index.tolist() == list(range(6))
    assert micro_batch.rollout_index.tolist() == [0, 0, 1, 2, 2, 2]
    assert micro_batch.num_tokens == 6
    assert micro_batch.has_shared_prompt


@pytest.mark.parametrize("share_prompt", [True, False])
def test_the_reference_and_the_age_of_a_token_stay_with_it(share_prompt: bool) -> None:
    batch = ragged_batch(5)
    tokens = np.arange(len(batch.completion_ids))
    batch = msgspec.structs.replace(
        batch, lags=tokens.astype(np.int32), logprobs_reference=-tokens.astype(np.float32)
    )
    for micro_batch in chain.from_iterable(pack(batch, num_ranks=3, share_prompt=share_prompt)):
        assert micro_batch.lags is not None and micro_batch.logprobs_reference is not None
        if micro_batch.num_tokens:
            assert micro_batch.lags.tolist() == micro_batch.flat_index.tolist()
            assert (-micro_batch.logprobs_reference).tolist() == micro_batch.flat_index.tolist()


def test_plain_rows_by_hand() -> None:
    batch = make_batch([[7, 8]], [(0, [1, 2]), (0, [3, 4, 5])])
    ((micro_batch,),) = pack(batch, share_prompt=False)
    assert micro_batch.token_ids.tolist() == [[7, 8, 3, 4], [7, 8, 1, 0]]
    assert micro_batch.segment_ids.tolist() == [[0, 0, 1, 1], [0, 0, 1, -1]]
    assert micro_batch.position_ids.tolist() == [[0, 1, 2, 3]] * 2
    assert micro_batch.gather_index.tolist() == [1, 2, 3, 5, 6]
    assert micro_batch.flat_index.tolist() == [2, 3, 4, 0, 1]
    assert micro_batch.rollout_index.tolist() == [0, 0, 0, 1, 1]
    assert not micro_batch.has_shared_prompt


def test_padding_is_known_by_length_and_not_by_token() -> None:
    # 0 pads, and 0 is also the end-of-sequence token of both completions
    batch = make_batch([[5]], [(0, [6, 0]), (0, [6, 7, 8, 0])])
    ((micro_batch,),) = pack(batch, share_prompt=False)
    assert micro_batch.target_ids.tolist() == [6, 7, 8, 0, 6, 0]
    assert micro_batch.segment_ids.tolist() == [[0, 1, 1, 1], [0, 1, -1, -1]]


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 9])
def test_every_token_is_computed_once_whatever_the_layout(
    num_ranks: int, share_prompt: bool
) -> None:
    batch = ragged_batch(num_ranks)
    ranks = pack(batch, num_ranks=num_ranks, share_prompt=share_prompt)
    assert len({len(micro_batches) for micro_batches in ranks}) == 1
    seen = np.concatenate([m.flat_index for micro_batches in ranks for m in micro_batches])
    assert sorted(seen.tolist()) == list(range(len(batch.completion_ids)))
    for micro_batch in (m for micro_batches in ranks for m in micro_batches):
        index = micro_batch.flat_index
        if micro_batch.num_tokens == 0:
            assert micro_batch.weights.tolist() == [0.0] and len(index) == 0
            continue
        rows, width = micro_batch.token_ids.shape
        assert rows == 1 or rows * width <= 64
        assert micro_batch.target_ids.tolist() == batch.completion_ids[index].tolist()
        assert micro_batch.logprobs.tolist() == batch.logprobs[index].tolist()


def test_a_group_stays_on_one_rank_and_ranks_are_balanced() -> None:
    batch = ragged_batch(3, num_groups=16)
    group_of_token = np.repeat(batch.group_index, batch.completion_lengths)
    ranks = pack(batch, num_ranks=4)
    groups = [
        set(group_of_token[np.concatenate([m.flat_index for m in micro_batches])].tolist())
        for micro_batches in ranks
    ]
    assert sum(len(g) for g in groups) == 16 == len(set.union(*groups))
    loads = [sum(m.num_tokens for m in micro_batches) for micro_batches in ranks]
    assert max(loads) <= 1.1 * sum(loads) / 4


def test_a_group_that_exceeds_the_budget_is_cut_into_several_rows() -> None:
    batch = make_batch([[1] * 10], [(0, [2] * 8) for _ in range(5)])
    ((*micro_batches,),) = pack(batch, budget=30)
    assert [m.token_ids.shape for m in micro_batches] == [(1, 24), (1, 24), (1, 17)]
    ((single, _),) = pack(make_batch([[1] * 10], [(0, [2] * 40), (0, [3])]), budget=30)
    assert single.token_ids.shape == (1, 49)  # longer than the budget: alone


def test_ranks_with_less_work_get_dummies_of_weight_zero() -> None:
    batch = make_batch([[1, 2], [3]], [(0, [4] * 60), (0, [5] * 60), (1, [6])])
    first, second, third = pack(batch, num_ranks=3)
    assert [[m.num_tokens for m in r] for r in (first, second, third)] == [[61, 61], [1, 0], [0, 0]]
    assert sum(float(m.weights.sum()) for r in (first, second, third) for m in r) == pytest.approx(
        1
    )


def test_token_weights_of_the_three_aggregations() -> None:
    batch = make_batch([[1]], [(0, [2] * 2), (0, [3] * 8)])
    expected = {
        "token-mean": ([1 / 10] * 2, [1 / 10] * 8),
        "seq-mean-token-mean": ([1 / 4] * 2, [1 / 16] * 8),
        "seq-mean-token-sum-norm": ([1 / 32] * 2, [1 / 32] * 8),
    }
    for aggregation, (short, long) in expected.items():
        weights = token_weights(batch, aggregation=aggregation, max_completion_length=16)  # type: ignore[arg-type]
        np.testing.assert_allclose(weights, short + long, rtol=1e-15)


def test_masked_rollouts_count_neither_above_nor_below_the_line() -> None:
    batch = make_batch([[1]], [(0, [2] * 2), (0, [3] * 8), (0, [4] * 2)], masked=(1,))
    expected = {
        "token-mean": [1 / 4] * 2 + [0] * 8 + [1 / 4] * 2,
        "seq-mean-token-mean": [1 / 4] * 2 + [0] * 8 + [1 / 4] * 2,
        "seq-mean-token-sum-norm": [1 / 32] * 2 + [0] * 8 + [1 / 32] * 2,
    }
    for aggregation, values in expected.items():
        weights = token_weights(batch, aggregation=aggregation, max_completion_length=16)  # type: ignore[arg-type]
        np.testing.assert_allclose(weights, values, rtol=1e-15)


def test_a_batch_that_is_masked_throughout_has_no_weight() -> None:
    batch = make_batch([[1]], [(0, [2, 3])], masked=(0,))
    weights = token_weights(batch, aggregation="token-mean", max_completion_length=16)
    assert weights.tolist() == [0.0, 0.0]


def test_rollouts_without_gradient_are_left_out_but_stay_in_the_denominator() -> None:
    batch = make_batch([[7, 8], [9]], [(0, [1, 2]), (0, [3]), (1, [4]), (1, [5, 6])], masked=(3,))
    weights = token_weights(batch, aggregation="token-mean", max_completion_length=16)
    needed = rollouts_with_gradient(batch, weights, entropy_bonus=True)
    assert needed.tolist() == [True, True, True, False]
    batch = msgspec.structs.replace(batch, advantages=-batch.advantages)  # 0, -1, -2, -3
    needed = rollouts_with_gradient(batch, weights, entropy_bonus=False)
    assert needed.tolist() == [False, True, True, False]  # advantage 0; and masked
    (micro_batch,) = micro_batches_of_rank(
        batch,
        weights,
        needed=needed,
        rank=0,
        num_ranks=1,
        micro_batch_tokens=64,
        share_prompt=True,
    )
    assert sorted(micro_batch.flat_index.tolist()) == [2, 3]
    assert micro_batch.weights.tolist() == [1 / 4] * 2  # four tokens are trained or have no signal


def test_a_batch_without_any_gradient_is_one_dummy_on_every_rank() -> None:
    batch = make_batch([[7]], [(0, [1]), (0, [2])])
    for rank in range(2):
        (micro_batch,) = micro_batches_of_rank(
            batch,
            np.ones(2),
            needed=np.zeros(2, dtype=bool),
            rank=rank,
            num_ranks=2,
            micro_batch_tokens=64,
            share_prompt=True,
        )
        assert micro_batch.num_tokens == 0 and micro_batch.weights.tolist() == [0.0]
