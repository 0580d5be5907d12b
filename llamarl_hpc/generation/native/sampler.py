"""From logits to tokens: temperature, nucleus, greedy, and the log-probability of what was drawn.

A draw is a fixed function of (seed, purpose, group id, completion index, position): it does not
depend on batch mates, on the replica, or on how often a group was started. The token is the
inverse of the cumulative distribution at that uniform number.

R rows (sequences), V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from llamarl_hpc.types import Array, GenerationRequest

_FIRST_LOOK = 256  # tokens in which the nucleus is looked for before the whole row is sorted


def uniform_draws(request: GenerationRequest, index: int) -> Array:
    """float32 [max_tokens] in [0, 1): the random numbers of completion `index` of a request."""
    sampling = request.sampling
    if sampling.temperature == 0.0:
        return np.zeros(sampling.max_tokens, dtype=np.float32)
    name = f"{sampling.seed}/{request.purpose.value}/{request.group_id}/{index}"
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key)).random(
        sampling.max_tokens, dtype=np.float32
    )


def sample(
    logits_RV: Tensor,
    temperatures: Sequence[float],
    top_ps: Sequence[float],
    draws: Sequence[float],
) -> tuple[list[int], list[float]]:
    """One token id and its log-probability for every row; `logits_RV` is overwritten.

    The log-probability is that of the distribution drawn from: after temperature, and with
    top_p < 1 of the truncated, renormalised one. Temperature 0 takes the most likely token and
    reports its log-probability at temperature 1. Raises FloatingPointError for logits that are not
    numbers: the weights have diverged, and nothing sampled from them would mean anything.
    """
    x_RV = logits_RV.float()
    device = x_RV.device
    if any(t not in (0.0, 1.0) for t in temperatures):
        x_RV.div_(torch.tensor([t or 1.0 for t in temperatures], device=device).unsqueeze(1))
    greedy = [t == 0.0 for t in temperatures]
    x_RV.sub_(x_RV.amax(-1, keepdim=True))
    best_R = x_RV.argmax(-1) if any(greedy) else None
    p_RV = x_RV.exp()
    mass_R = p_RV.sum(-1)
    if not bool(mass_R.isfinite().all()):
        raise FloatingPointError("the model's logits are not finite; its weights have diverged")
    limited = [p < 1.0 and not g for p, g in zip(top_ps, greedy, strict=True)]
    if any(limited):
        rows = torch.tensor([i for i, flag in enumerate(limited) if flag], device=device)
        top_p = torch.tensor([top_ps[i] for i in rows.tolist()], device=device)
        kept = _nucleus(p_RV[rows], top_p * mass_R[rows])
        p_RV[rows] = kept
        mass_R[rows] = kept.sum(-1)
    ids_R = _inverse_cdf(p_RV, torch.tensor(draws, dtype=torch.float32, device=device))
    if best_R is not None:
        ids_R = torch.where(torch.tensor(greedy, device=device), best_R, ids_R)
    chosen_R = x_RV.gather(1, ids_R.unsqueeze(1)).squeeze(1)
    logprobs_R = chosen_R - mass_R.log()
    return ids_R.tolist(), logprobs_R.tolist()


def _inverse_cdf(p_RV: Tensor, draws_R: Tensor) -> Tensor:
    """First token at which the cumulative sum exceeds draw * total; it never has p = 0."""
    cdf_RV = p_RV.cumsum(-1)
    total_R = cdf_RV[:, -1]
    below = torch.nextafter(total_R, torch.zeros_like(total_R))  # draw * total may round up
    threshold_R = torch.minimum(draws_R * total_R, below)
    return torch.searchsorted(cdf_RV, threshold_R.unsqueeze(1), right=True).squeeze(1)


def _nucleus(p_RV: Tensor, wanted_R: Tensor) -> Tensor:
    """`p_RV` with 0 outside the smallest set of most likely tokens whose mass reaches `wanted_R`.

    Tokens exactly as likely as the last one taken are kept too.
    """
    size = min(_FIRST_LOOK, p_RV.shape[1])
    top = p_RV.topk(size, dim=-1).values
    sums = top.cumsum(-1)
    if bool((sums[:, -1] < wanted_R).any()):
        top = p_RV.sort(dim=-1, descending=True).values
        sums = top.cumsum(-1)
    last = (sums < wanted_R.unsqueeze(1)).sum(-1).clamp(max=top.shape[1] - 1)
    smallest = top.gather(1, last.unsqueeze(1))
    return p_RV.masked_fill(p_RV < smallest, 0.0)
