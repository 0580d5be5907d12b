"""Log-probs of tokens: values, gradients, temperature, and what stays in memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from llamarl_hpc.training.logprobs import token_logprobs


def reference(hidden: Tensor, weight: Tensor, target: Tensor, temperature: float) -> Tensor:
    logits = hidden @ weight.T / temperature
    return logits.log_softmax(-1).gather(-1, target[:, None]).squeeze(-1)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_values_and_gradients_equal_the_direct_formula(
    chunk_tokens: int, temperature: float
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    target, upstream = torch.randint(0, 11, (7,)), torch.randn(7, dtype=torch.float64)
    logprobs, entropy = token_logprobs(
        hidden, weight, target, temperature=temperature, chunk_tokens=chunk_tokens
    )
    grads = torch.autograd.grad((logprobs * upstream).sum(), [hidden, weight])
    expected = reference(hidden, weight, target, temperature)
    expected_grads = torch.autograd.grad((expected * upstream).sum(), [hidden, weight])
    torch.testing.assert_close(logprobs, expected, rtol=1e-13, atol=1e-13)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    distribution = torch.distributions.Categorical(logits=hidden @ weight.T / temperature)
    torch.testing.assert_close(entropy, distribution.entropy(), rtol=1e-12, atol=1e-13)
    assert not entropy.requires_grad


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_gradient_of_the_entropy_equals_the_direct_formula(
    chunk_tokens: int, temperature: float
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    target, upstream = torch.randint(0, 11, (7,)), torch.randn(2, 7, dtype=torch.float64)
    logprobs, entropy = token_logprobs(
        hidden,
        weight,
        target,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        entropy_gradient=True,
    )
    total = (logprobs * upstream[0] + entropy * upstream[1]).sum()
    grads = torch.autograd.grad(total, [hidden, weight])
    distribution = torch.distributions.Categorical(logits=hidden @ weight.T / temperature)
    expected = distribution.log_prob(target) * upstream[0] + distribution.entropy() * upstream[1]
    expected_grads = torch.autograd.grad(expected.sum(), [hidden, weight])
    for ours, theirs in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_a_token_of_probability_zero_leaves_the_gradient_of_the_entropy_finite() -> None:
    hidden = torch.tensor([[0.0, -500.0, 1.0]], requires_grad=True)
    _, entropy = token_logprobs(
        hidden,
        torch.eye(3),
        torch.tensor([0]),
        temperature=1.0,
        chunk_tokens=4,
        entropy_gradient=True,
    )
    (gradient,) = torch.autograd.grad(entropy.sum(), hidden)
    p = 1.0 / (1.0 + math.e)
    h = -p * math.log(p) - (1 - p) * math.log(1 - p)
    expected = [-p * (math.log(p) + h), 0.0, -(1 - p) * (math.log(1 - p) + h)]
    assert gradient.tolist()[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("temperature", "expected"), [(0.5, -0.142932), (1.0, -0.407606)])
def test_temperature_divides_the_logits(temperature: float, expected: float) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    logprobs, _ = token_logprobs(
        logits, torch.eye(3), torch.tensor([0]), temperature=temperature, chunk_tokens=4
    )
    exact = -math.log(sum(math.exp((x - 2.0) / temperature) for x in (2.0, 1.0, 0.0)))
    assert logprobs.item() == pytest.approx(exact, abs=1e-7)
    assert logprobs.item() == pytest.approx(expected, abs=1e-6)


def test_no_more_logits_than_a_chunk_are_kept_for_the_backward_pass() -> None:
    hidden, weight = torch.randn(64, 4, requires_grad=True), torch.randn(1000, 4)
    target = torch.randint(0, 1000, (64,))
    logprobs, _ = token_logprobs(hidden, weight, target, temperature=1.0, chunk_tokens=16)
    kept = [t for t in logprobs.grad_fn.saved_tensors if t is not None]  # type: ignore[union-attr]
    assert sum(t.numel() for t in kept) == 64 * 4 + 1000 * 4 + 64 + 64


def test_bf16_logits_are_normalised_in_float32() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(6, 32, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(50, 32, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, 50, (6,))
    logprobs, _ = token_logprobs(hidden, weight, target, temperature=0.7, chunk_tokens=4)
    logits = torch.nn.functional.linear(hidden, weight).float()
    expected = (logits / 0.7).log_softmax(-1).gather(-1, target[:, None]).squeeze(-1)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=1e-6)
    logprobs.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16
