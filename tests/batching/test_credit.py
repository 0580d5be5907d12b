"""Credit: truncated completions and penalties for length, by hand; and the batch made of it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from llamarl_hpc.batching.buffer import ScoredGroup, credit_of, make_train_batch
from llamarl_hpc.batching.credit import Credit, CreditRules, assign_credit, divergence
from llamarl_hpc.batching.packing import token_weights
from llamarl_hpc.config.schema import Config
from llamarl_hpc.controller.step_metrics import batch_metrics
from llamarl_hpc.types import Completion, FinishReason, Prompt, VersionSpan

REWARDS, LENGTHS = [1.0, 0.0, 0.0, 1.0], [4, 10, 2, 6]
CUT = [False, True, False, False]


def rules(**algorithm: Any) -> CreditRules:
    config = {"algorithm": algorithm, "rollout": {"max_completion_length": 10}}
    return CreditRules.of(Config.model_validate(config))


def credit(cut: list[bool] = CUT, **algorithm: Any) -> Credit:
    return assign_credit([REWARDS], [LENGTHS], [cut], rules(**algorithm))


@pytest.mark.parametrize(
    ("option", "advantages", "trained"),
    [
        ("keep", [0.5, -0.5, -0.5, 0.5], [True] * 4),
        ("mask", [0.5, -0.5, -0.5, 0.5], [True, False, True, True]),
        ("drop", [1 / 3, 0.0, -2 / 3, 1 / 3], [True, False, True, True]),
    ],
)
def test_one_of_four_truncated(option: str, advantages: list[float], trained: list[bool]) -> None:
    given = credit(truncated_completions=option)
    np.testing.assert_allclose(given.advantages, advantages, rtol=1e-15)
    assert given.trained.tolist() == trained
    assert given.constant == [False]


@pytest.mark.parametrize(
    ("option", "advantages", "constant"),
    [
        ("keep", [0.5, -0.5, -0.5, 0.5], False),
        ("mask", [0.5, -0.5, -0.5, 0.5], False),
        ("drop", [0.0] * 4, True),
    ],
)
def test_all_of_four_truncated(option: str, advantages: list[float], constant: bool) -> None:
    given = credit([True] * 4, truncated_completions=option)
    assert given.advantages.tolist() == advantages
    assert given.trained.tolist() == [option == "keep"] * 4
    assert given.constant == [constant]


def test_what_is_dropped_is_in_no_baseline_of_the_batch() -> None:
    given = assign_credit(
        [[5.0, 1.0], [3.0]],
        [[1, 1], [1]],
        [[True, False], [False]],
        rules(truncated_completions="drop", advantage="reinforce_pp"),
    )
    assert given.advantages.tolist() == [0.0, -1.0, 1.0]
    only_one_left = assign_credit(
        [[5.0, 1.0]], [[1, 1]], [[True, False]], rules(truncated_completions="drop")
    )
    assert only_one_left.advantages.tolist() == [0.0, 0.0]
    assert only_one_left.constant == [True]


def test_the_overlong_penalty_grows_over_the_last_tokens() -> None:
    given = rules(overlong_buffer=4, overlong_penalty=2.0)
    assert given.penalties([1, 6, 7, 8, 9, 10]).tolist() == [0.0, 0.0, 0.5, 1.0, 1.5, 2.0]
    assert rules().penalties([10]).tolist() == [0.0]


def test_the_length_penalty_is_in_proportion_and_adds_up_with_the_other() -> None:
    assert rules(length_penalty=0.5).penalties([1, 5, 10]) == pytest.approx([0.05, 0.25, 0.5])
    both = rules(length_penalty=0.5, overlong_buffer=10)
    assert both.penalties([5, 10]) == pytest.approx([0.75, 1.5])


def test_penalties_come_before_the_baseline() -> None:
    given = credit(length_penalty=1.0)
    # 1 - 0.4, 0 - 1, 0 - 0.2, 1 - 0.6; their mean is -0.05
    np.testing.assert_allclose(given.advantages, [0.65, -0.95, -0.15, 0.45], rtol=1e-14)
    assert given.penalties == pytest.approx([0.4, 1.0, 0.2, 0.6])


def test_lengths_alone_can_make_a_group_worth_learning_from() -> None:
    flat = assign_credit([[1.0, 1.0]], [[2, 8]], [[False, False]], rules())
    assert flat.constant == [True]
    shaped = assign_credit([[1.0, 1.0]], [[2, 8]], [[False] * 2], rules(length_penalty=1.0))
    assert shaped.constant == [False]
    np.testing.assert_allclose(shaped.advantages, [0.3, -0.3], rtol=1e-14)


def test_reinforce_pp_has_signal_where_prompts_differ_though_groups_do_not() -> None:
    """One completion of each prompt, as this advantage is for: no alarm of no signal."""
    by_batch, one_each = rules(advantage="reinforce_pp"), [[False], [False]]
    given = assign_credit([[1.0], [0.0]], [[2], [2]], one_each, by_batch)
    assert given.constant == [False, False]
    assert given.advantages.tolist() == [1.0, -1.0]
    flat = assign_credit([[0.3], [0.1 + 0.2]], [[2], [2]], one_each, by_batch)
    assert flat.constant == [True, True] and flat.advantages.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({}, [0.5, -0.5]),
        ({"advantage": "reinforce_pp"}, [1.0, -1.0]),
        ({"length_penalty": 1.0}, [0.5 + 0.1, -0.5 - 0.1]),
        ({"beta": 0.1, "kl_in": "reward"}, [0.5 + 0.1, -0.5 - 0.1]),
    ],
)
def test_a_group_whose_scoring_failed_teaches_nothing(
    option: dict[str, Any], expected: list[float]
) -> None:
    given = assign_credit(
        [[0.0, 0.0], [1.0, 0.0]],
        [[1, 9], [3, 5]],
        [[False, True], [False, False]],
        rules(**option),
        [[0.0, 5.0], [1.0, 3.0]] if "beta" in option else None,
        failed=[True, False],
    )
    np.testing.assert_allclose(given.advantages, [0.0, 0.0, *expected], rtol=1e-14)
    assert given.trained.tolist() == [False, False, True, True]
    assert given.constant == ([False] * 2 if "advantage" in option else [True, False])


# ------------------------------------------------------------------ the batch


def group(
    ticket: int,
    rewards: list[float],
    lengths: list[int],
    cut: list[bool],
    *,
    reference: float | None = None,
) -> ScoredGroup:
    """Log-probs are -1, those of the reference `reference`."""
    completions = [
        Completion(
            token_ids=np.full(length, 7, dtype=np.int32),
            logprobs=np.full(length, -1.0, dtype=np.float32),
            versions=[VersionSpan(0, length, 0)],
            finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
            text="",
            t_start=0.0,
            t_end=1.0,
        )
        for length, is_cut in zip(lengths, cut, strict=True)
    ]
    return ScoredGroup(
        ticket=ticket,
        issue=1,
        prompt=Prompt(
            prompt_id="p", epoch=0, text="", token_ids=np.array([1, 2], np.int32), columns={}
        ),
        generator="generator.0",
        completions=completions,
        rewards={"r": list(rewards)},
        reward=rewards,
        error="",
        t_issued=0.0,
        t_generated=0.0,
        t_scored=0.0,
        logprobs_reference=[np.full(n, reference, np.float32) for n in lengths]
        if reference is not None
        else [],
    )


@pytest.mark.parametrize(
    ("option", "masked", "trained_tokens"), [("keep", 0, 25), ("mask", 10, 15), ("drop", 10, 15)]
)
def test_a_batch_has_the_credit_of_its_groups(
    option: str, masked: int, trained_tokens: int
) -> None:
    groups = [group(0, REWARDS, LENGTHS, CUT), group(1, [1.0, 1.0], [1, 2], [False, False])]
    given = rules(truncated_completions=option)
    batch = make_train_batch(groups, step=0, temperature=1.0, rules=given)
    assert batch.advantages.dtype == np.float32
    assert batch.advantages[4:].tolist() == [0.0, 0.0]
    assert int((~batch.loss_mask).sum()) == masked
    assert batch.loss_mask[4:14].all() == (masked == 0)
    weights = token_weights(batch, aggregation="token-mean", max_completion_length=10)
    assert weights.max() == pytest.approx(1 / trained_tokens)
    metrics = batch_metrics(
        groups, trainer_version=0, credit=assign_credit(
            [g.reward for g in groups], [LENGTHS, [1, 2]], [CUT, [False] * 2], given
        )
    )  # fmt: skip
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["reward/mean"] == pytest.approx(4 / 6)
    assert metrics["reward/length_penalty"] == 0.0
    assert metrics["completions/clipped_ratio"] == pytest.approx(1 / 6)


def test_a_batch_leaves_out_the_group_whose_scoring_failed() -> None:
    sound, broken = group(0, REWARDS, LENGTHS, CUT), group(1, [0.0] * 2, [1, 9], [False] * 2)
    broken = msgspec.structs.replace(broken, failed=True)
    batch = make_train_batch(
        [sound, broken], step=0, temperature=1.0, rules=rules(length_penalty=1.0)
    )
    alone = make_train_batch([sound], step=0, temperature=1.0, rules=rules(length_penalty=1.0))
    assert batch.advantages[:4].tolist() == alone.advantages.tolist()
    assert batch.advantages[4:].tolist() == [0.0, 0.0]
    assert not batch.loss_mask[22:].any() and batch.loss_mask[:22].all()


def test_the_kl_of_the_reward_is_a_mean_over_tokens_its_penalty_one_over_rollouts() -> None:
    groups = [
        group(0, [1.0, 0.0], [2, 6], [False] * 2, reference=-1.5),
        group(1, [1.0, 0.0], [1, 1], [False] * 2, reference=-2.0),
    ]
    spent = rules(beta=0.5, kl_in="reward", kl_estimator="k1")
    metrics = batch_metrics(groups, trainer_version=0, credit=credit_of(groups, spent))
    assert metrics["kl"] == pytest.approx((8 * 0.5 + 2 * 1.0) / 10)
    assert metrics["reward/kl_penalty"] == pytest.approx(0.5 * (1.0 + 3.0 + 1.0 + 1.0) / 4)


def test_a_batch_of_truncated_completions_has_nothing_to_train() -> None:
    groups = [group(0, REWARDS, LENGTHS, [True] * 4)]
    for option in ("mask", "drop"):
        given = rules(truncated_completions=option)
        batch = make_train_batch(groups, step=0, temperature=1.0, rules=given)
        weights = token_weights(batch, aggregation="token-mean", max_completion_length=10)
        assert not weights.any()


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", 0.5 - 0.5 + 0.0 - 60.0),
        ("k2", 0.125 + 0.125 + 0.0 + 1800.0),
        ("k3", np.exp(-0.5) - 0.5 + np.exp(0.5) - 1.5 + np.exp(20) - 21),
    ],
)
def test_the_divergence_of_a_completion_is_the_sum_over_its_tokens(
    estimator: Any, expected: float
) -> None:
    behaviour = np.array([-1.0, -2.0, -3.0, -61.0])
    reference = np.array([-1.5, -1.5, -3.0, -1.0])
    assert divergence(behaviour, reference, estimator) == pytest.approx(expected, rel=1e-14)


def test_kl_in_the_reward_is_taken_off_before_the_advantage_and_hides_no_constant_group() -> None:
    given = assign_credit(
        [[1.0, 1.0], [1.0, 0.0]],
        [[5, 5], [5, 5]],
        [[False, False], [False, False]],
        rules(beta=0.1, kl_in="reward", kl_estimator="k1"),
        [[2.0, 4.0], [0.0, -1.0]],
    )
    # rewards 0.8, 0.6 and 1.0, 0.1
    np.testing.assert_allclose(given.advantages, [0.1, -0.1, 0.45, -0.45], rtol=1e-14)
    assert given.constant == [True, False]
    assert given.divergence is not None and given.divergence.tolist() == [2.0, 4.0, 0.0, -1.0]


def scored(ticket: int, reference: list[float], reward: list[float]) -> ScoredGroup:
    """Two completions of one token each, drawn by version 3 with log-prob -1."""
    completions = [
        Completion(
            token_ids=np.array([7], dtype=np.int32),
            logprobs=np.array([-1.0], dtype=np.float32),
            versions=[VersionSpan(0, 1, 3)],
            finish_reason=FinishReason.STOP,
            text="",
            t_start=0.0,
            t_end=0.0,
        )
    ] * 2
    return ScoredGroup(
        ticket=ticket,
        issue=1,
        prompt=Prompt(
            prompt_id="p", epoch=0, text="", token_ids=np.array([1], np.int32), columns={}
        ),
        generator="generator.0",
        completions=completions,
        rewards={"r": list(reward)},
        reward=reward,
        error="",
        t_issued=0.0,
        t_generated=0.0,
        t_scored=0.0,
        logprobs_reference=[np.array([value], np.float32) for value in reference],
    )


def test_a_batch_carries_the_reference_for_the_loss_or_spends_it_on_the_reward() -> None:
    groups = [scored(0, [-2.0, -1.0], [1.0, 1.0]), scored(1, [-1.0, -3.0], [0.0, 1.0])]
    in_loss = make_train_batch(
        groups, step=0, temperature=1.0, rules=rules(beta=0.5), trainer_version=5
    )
    assert in_loss.logprobs_reference is not None and in_loss.lags is not None
    assert in_loss.logprobs_reference.tolist() == [-2.0, -1.0, -1.0, -3.0]
    assert in_loss.lags.tolist() == [2, 2, 2, 2]
    assert in_loss.advantages.tolist() == [0.0, 0.0, -0.5, 0.5]
    spent = rules(beta=0.5, kl_in="reward", kl_estimator="k1")
    in_reward = make_train_batch(groups, step=0, temperature=1.0, rules=spent)
    assert in_reward.logprobs_reference is None and in_reward.lags is None
    # log(mu / reference) is 1, 0 and 0, 2; half of it is taken off
    assert in_reward.advantages.tolist() == [-0.25, 0.25, 0.0, 0.0]
    metrics = batch_metrics(groups, trainer_version=5, credit=credit_of(groups, spent))
    assert metrics["kl"] == 0.75 and metrics["reward/kl_penalty"] == 0.375
    assert metrics["frac_reward_zero_std"] == 0.5
