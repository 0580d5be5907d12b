"""Log-probabilities of given tokens, without ever holding all logits.

The output head of a language model is its widest matrix: the logits of a micro-batch would take
K x V float32 several times over. Here only `chunk_tokens` rows of them exist at a time; the
backward pass computes them again, chunk by chunk. It is one autograd node (not one checkpoint per
chunk), so every rank enters the head exactly once per pass whatever its number of chunks, which
ZeRO-3's gathering needs.

Letters: K gathered positions, D width of the model, V vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def token_logprobs(
    hidden_KD: Tensor,
    weight_VD: Tensor,
    target_K: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `target_K` and entropies, both [K], under softmax(logits / temperature).

    Logits are computed in the model's dtype and normalised in float32 (float64 for a float64
    model). Gradients flow through the log-probabilities; without `entropy_gradient` the entropy
    is only a figure.
    """
    assert temperature > 0.0, "greedy rollouts are never trained"
    outputs = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_KD, weight_VD, target_K, temperature, chunk_tokens, entropy_gradient
    )
    return cast("tuple[Tensor, Tensor]", outputs)


class LogprobHead(nn.Module):
    """The head as a module of its own, so that ZeRO-3 gathers its (maybe tied) weight for it."""

    def __init__(
        self, weight: nn.Parameter, *, chunk_tokens: int, entropy_gradient: bool = False
    ) -> None:
        super().__init__()
        self.weight = weight
        self.chunk_tokens = chunk_tokens
        self.entropy_gradient = entropy_gradient

    def forward(
        self, hidden_KD: Tensor, target_K: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            hidden_KD,
            self.weight,
            target_K,
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            entropy_gradient=self.entropy_gradient,
        )


def _logits(hidden_CD: Tensor, weight_VD: Tensor, temperature: float) -> Tensor:
    logits = F.linear(hidden_CD, weight_VD)
    if logits.dtype != torch.float64:
        logits = logits.float()
    return logits if temperature == 1.0 else logits.div_(temperature)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_KD: Tensor,
        weight_VD: Tensor,
        target_K: Tensor,
        temperature: float,
        chunk_tokens: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies, normalisers = [], [], []
        probabilities = hidden_KD.new_empty(0)
        num_tokens = hidden_KD.shape[0]
        for start in range(0, num_tokens, chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits = _logits(hidden_KD[chunk], weight_VD, temperature)
            # Shifted by the largest logit first: a log-prob is then as exact as its own size
            # allows, not as the size of the logits does.
            largest = logits.amax(dim=-1, keepdim=True)
            logits.sub_(largest)
            probabilities = logits.exp()
            total = probabilities.sum(dim=-1, keepdim=True)
            probabilities.div_(total)
            log_total = total.log().squeeze(-1)
            chosen = logits.gather(-1, target_K[chunk, None]).squeeze(-1)
            logprobs.append(chosen - log_total)
            # entropy = log Z - sum p * logit
            entropies.append(log_total - torch.linalg.vecdot(probabilities, logits))
            normalisers.append(largest.squeeze(-1) + log_total)
        # A single chunk may stay: it is within the bound, and saves computing it again.
        kept = probabilities if num_tokens <= chunk_tokens else None
        entropy = torch.cat(entropies)
        saved_entropy = entropy if entropy_gradient else None
        ctx.save_for_backward(
            hidden_KD, weight_VD, target_K, torch.cat(normalisers), kept, saved_entropy
        )
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_K, grad_entropy_K = grads
        hidden_KD, weight_VD, target_K, normalisers, kept, entropy_K = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden_KD) if ctx.needs_input_grad[0] else None
        grad_weight: Tensor | None = None
        for start in range(0, hidden_KD.shape[0], ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            grad_logits = kept
            if grad_logits is None:
                logits = _logits(hidden_KD[chunk], weight_VD, ctx.temperature)
                grad_logits = logits.sub_(normalisers[chunk, None]).exp_()
            # d logprob / d logit = (onehot - p) / temperature, in place of p
            scaled = (grad_K[chunk] / ctx.temperature).unsqueeze(-1)
            if entropy_K is not None:
                of_entropy = _entropy_gradient(grad_logits, entropy_K[chunk, None])
                of_entropy.mul_((grad_entropy_K[chunk] / ctx.temperature).unsqueeze(-1))
            grad_logits.mul_(-scaled).scatter_add_(-1, target_K[chunk, None], scaled)
            if entropy_K is not None:
                grad_logits.add_(of_entropy)
            grad_logits = grad_logits.to(weight_VD.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight_VD, out=grad_hidden[chunk])
            if ctx.needs_input_grad[1]:
                if grad_weight is None:
                    grad_weight = grad_logits.t() @ hidden_KD[chunk]
                else:
                    grad_weight.addmm_(grad_logits.t(), hidden_KD[chunk])
        return grad_hidden, grad_weight, None, None, None, None


def _entropy_gradient(probabilities: Tensor, entropy: Tensor) -> Tensor:
    """d entropy / d (logit / temperature) = -p * (log p + entropy); 0 where p is."""
    return torch.xlogy(probabilities, probabilities).addcmul_(probabilities, entropy).neg_()
