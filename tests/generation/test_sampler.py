"""Draws, temperature, nucleus, greedy: against numbers computed by hand or by torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from engine_runs import request

from llamarl_hpc.generation.native.sampler import sample, uniform_draws
from llamarl_hpc.types import Purpose

GOLDEN = [0.08813626, 0.61867946, 0.57791167, 0.71322668]  # of group 7, index 2, seed 3


def _frequencies(probabilities: list[float], **params: float) -> tuple[list[float], list[float]]:
    """Share and log-probability of each token over 10,000 evenly spaced draws."""
    count = 10_000
    logits = torch.tensor(probabilities).log().repeat(count, 1)
    draws = [(i + 0.5) / count for i in range(count)]
    temperature, top_p = params.get("temperature", 1.0), params.get("top_p", 1.0)
    ids, logprobs = sample(logits, [temperature] * count, [top_p] * count, draws)
    share = np.bincount(ids, minlength=len(probabilities)) / count
    by_token = [float("nan")] * len(probabilities)
    for token, logprob in zip(ids, logprobs, strict=True):
        by_token[token] = logprob
    return share.tolist(), by_token


def test_tokens_are_drawn_in_proportion_and_reported_with_their_logprob() -> None:
    share, logprobs = _frequencies([0.1, 0.2, 0.3, 0.4])
    assert share == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=2e-4)
    assert logprobs == pytest.approx([math.log(p) for p in (0.1, 0.2, 0.3, 0.4)], abs=1e-6)


def test_temperature_sharpens_before_the_draw() -> None:
    share, logprobs = _frequencies([0.2, 0.8], temperature=0.5)
    wanted = [0.04 / 0.68, 0.64 / 0.68]  # squares, renormalised
    assert share == pytest.approx(wanted, abs=2e-4)
    assert logprobs == pytest.approx([math.log(p) for p in wanted], abs=1e-6)


def test_top_p_keeps_the_smallest_sufficient_set_and_renormalises() -> None:
    share, logprobs = _frequencies([0.1, 0.2, 0.3, 0.4], top_p=0.6)
    wanted = [0.0, 0.0, 3 / 7, 4 / 7]  # 0.4 is too little, 0.4 + 0.3 is enough
    assert share == pytest.approx(wanted, abs=2e-4)
    assert logprobs[2:] == pytest.approx([math.log(3 / 7), math.log(4 / 7)], abs=1e-6)


def test_top_p_looks_past_its_first_look_when_the_distribution_is_flat() -> None:
    vocab = 1000
    flat = torch.log(torch.linspace(1.0, 1.1, vocab)).unsqueeze(0)  # 256 tokens hold about 27 %
    draws = [(i + 0.5) / 500 for i in range(500)]
    ids, _ = sample(flat.repeat(500, 1), [1.0] * 500, [0.5] * 500, draws)
    p = torch.linspace(1.0, 1.1, vocab, dtype=torch.float64)
    kept = int((p.flip(0).cumsum(0) < 0.5 * p.sum()).sum()) + 1
    assert min(ids) == pytest.approx(vocab - kept, abs=2)
    assert max(ids) == pytest.approx(vocab - 1, abs=2)


def test_greedy_reports_the_logprob_at_temperature_one_and_mixes_with_sampling() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0], [0.0, 1.0, 3.0]])
    reference = torch.log_softmax(logits[0], -1)
    ids, logprobs = sample(logits, [0.0, 2.0], [1.0, 1.0], [0.0, 0.0])
    assert ids == [2, 0]
    assert logprobs[0] == pytest.approx(float(reference[2]), abs=1e-6)
    half = torch.log_softmax(torch.tensor([0.0, 0.5, 1.5]), -1)
    assert logprobs[1] == pytest.approx(float(half[0]), abs=1e-6)


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).repeat(3, 1)
    ids, logprobs = sample(logits, [1.0] * 3, [1.0] * 3, [0.0, 0.5, 1 - 2**-24])
    assert ids == [1, 3, 3]
    assert logprobs == pytest.approx([math.log(0.5)] * 3)


def test_logprobs_match_log_softmax_over_a_large_vocabulary() -> None:
    torch.manual_seed(0)
    logits = torch.randn(16, 49_152) * 4
    reference = torch.log_softmax(logits.double() / 1.3, -1)
    draws = np.random.default_rng(0).random(16, dtype=np.float32).tolist()
    ids, logprobs = sample(logits.clone(), [1.3] * 16, [1.0] * 16, draws)
    wanted = [float(reference[row, token]) for row, token in enumerate(ids)]
    assert logprobs == pytest.approx(wanted, abs=2e-6)


def test_logits_that_are_not_numbers_are_an_error_not_a_token() -> None:
    logits = torch.tensor([[0.0, 1.0], [0.0, math.nan]])
    with pytest.raises(FloatingPointError, match="diverged"):
        sample(logits, [1.0] * 2, [1.0] * 2, [0.5] * 2)


def test_draws_are_a_fixed_function_of_the_request_and_the_index() -> None:
    one = uniform_draws(request(7, [1], max_tokens=4, seed=3), 2)
    assert one.dtype == np.float32 and ((one >= 0) & (one < 1)).all()
    # the very numbers: a change would break the repeatability of stored runs
    assert one.tolist() == pytest.approx(GOLDEN, abs=1e-7)
    longer = uniform_draws(request(7, [9, 9], max_tokens=6, seed=3), 2)
    assert longer[:4].tolist() == one.tolist()  # neither prompt nor limit matters


def test_draws_differ_by_seed_purpose_group_and_index() -> None:
    base = request(7, [1], seed=3)
    variants = [
        uniform_draws(base, 2),
        uniform_draws(base, 3),
        uniform_draws(request(8, [1], seed=3), 2),
        uniform_draws(request(7, [1], seed=4), 2),
        uniform_draws(request(7, [1], seed=3, purpose=Purpose.EVAL), 2),
    ]
    assert len({draws.tobytes() for draws in variants}) == len(variants)
