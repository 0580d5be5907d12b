"""The policy losses, as functions of tensors: no model, no ranks.

`config/losses.py` says what each loss_type is made of, docs/algorithms.md has the formulas and
where they come from. pi is the policy that is trained, mu the one that sampled, r = pi/mu. A token
of a rollout is always with all the others of it in one micro-batch, so a ratio of sequences needs
no communication. Letters: K tokens of a micro-batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llamarl_hpc.batching.packing import MicroBatch
from llamarl_hpc.config.losses import KlEstimator, Level, LossSettings
from llamarl_hpc.training.loss_sums import SUMS, LossSums

LOG_RATIO_BOUND = 20.0  # exp(20) = 5e8: far beyond any bound of a weight, far below overflow


def micro_batch_loss(
    micro_batch: MicroBatch, logprobs: Tensor, entropy: Tensor, *, settings: LossSettings
) -> tuple[Tensor, LossSums]:
    """`policy_loss` of a micro-batch, given what the policy says about its tokens, [K] each."""
    device = logprobs.device
    reference, lags = micro_batch.logprobs_reference, micro_batch.lags
    return policy_loss(
        logprobs,
        torch.from_numpy(micro_batch.logprobs).to(device),
        torch.from_numpy(micro_batch.advantages).to(device),
        torch.from_numpy(micro_batch.weights).to(device),
        entropy,
        torch.from_numpy(micro_batch.rollout_index).to(device),
        reference=None if reference is None else torch.from_numpy(reference).to(device),
        lags=None if lags is None else torch.from_numpy(lags).to(device),
        settings=settings,
    )


def policy_loss(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    weights: Tensor,
    entropy: Tensor,
    rollout: Tensor,
    *,
    reference: Tensor | None = None,
    lags: Tensor | None = None,
    settings: LossSettings,
) -> tuple[Tensor, LossSums]:
    """Loss (a scalar that adds up over micro-batches and ranks) and its figures.

    All tensors are [K]. `weights` are the tokens' shares in the loss of the global batch: they
    hold its denominators and its mask (see `batching.packing.token_weights`). Where a weight is 0
    the other values may be anything, even nan: they are replaced before any arithmetic. `rollout`
    (int64) numbers the rollouts from 0. With a KL term `reference` has the log-probs of the
    reference; for a decoupled loss `lags` says how many steps older than pi the mu of a token is.
    """
    zero = torch.zeros_like(logprobs)
    mask = weights > 0
    logprobs = torch.where(mask, logprobs, zero)
    behaviour = torch.where(mask, behaviour.to(logprobs.dtype), zero)
    advantages = torch.where(mask, advantages.to(logprobs.dtype), zero)
    weights = weights.to(logprobs.dtype)

    difference = logprobs - behaviour
    log_ratio = _at_level(difference, mask, rollout, settings.level)
    ratio = used_ratio = _exp(log_ratio)
    correction, corrected = None, torch.zeros_like(mask)
    behaviour_weight, capped = None, torch.zeros_like(mask)
    if settings.is_decoupled:
        assert lags is not None, "a decoupled loss needs the age of every token"
        to_proximal = _proximal_share(lags, logprobs.dtype) * difference.detach()
        used_ratio = _exp(_at_level(difference - to_proximal, mask, rollout, settings.level))
        behaviour_weight = _exp(to_proximal)
        capped = behaviour_weight > settings.behaviour_max
        behaviour_weight = behaviour_weight.clamp(max=settings.behaviour_max)
    if settings.mismatch_correction != "none":
        mismatch = _exp(_at_level(difference.detach(), mask, rollout, settings.mismatch_level))
        correction, corrected = _correction(mismatch, settings)
        if settings.mismatch_correction == "truncate":
            # A batch makes one step, so the policy just before it is pi itself: the correction
            # carries all of pi/mu, and what is left for the ratio is 1 with its gradient.
            used_ratio = (log_ratio - log_ratio.detach()).exp()
    per_token, clipped = _surrogate(logprobs, used_ratio, advantages, settings)
    if behaviour_weight is not None:
        per_token = behaviour_weight * per_token
    if correction is not None:
        per_token = correction * per_token
    divergence, referred = torch.zeros_like(ratio), torch.zeros_like(mask)
    if settings.beta > 0.0:
        assert reference is not None, "a KL term needs a reference"
        reference = torch.where(mask, reference.to(logprobs.dtype), zero)
        divergence, referred = kl_estimate(logprobs - reference, settings.kl_estimator), mask
        per_token = per_token + settings.beta * divergence
    if settings.entropy_coef > 0.0:
        per_token = per_token - settings.entropy_coef * torch.where(mask, entropy, zero)
    loss = (weights * per_token).sum()
    with torch.no_grad():
        columns = {
            "loss": weights * per_token,
            "ratio": ratio,
            "ratio_squared": ratio.square(),
            "clipped": clipped | capped,
            "corrected": corrected,
            "entropy": entropy,
            "kl": divergence,
            "referred": referred,
        }
        return loss, _figures(columns, difference, mask)


def _figures(columns: dict[str, Tensor], difference: Tensor, mask: Tensor) -> LossSums:
    """Sums over the trained tokens; those that only need `difference`, log pi/mu, are added."""
    bounded = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    columns = columns | {
        "tokens": mask,
        "bounded": difference.abs() > LOG_RATIO_BOUND,
        "mismatch_kl": bounded.exp() - 1.0 - bounded,
        "abs_diff": difference.abs(),
    }
    dtype = difference.dtype
    table = torch.stack([columns[name].to(dtype) for name in SUMS]).double()
    maxima = torch.stack([columns["ratio"], difference.abs()]).double()
    return LossSums(
        sums=torch.where(mask, table, 0.0).sum(dim=1),
        maxima=torch.where(mask, maxima, 0.0).amax(dim=1),
    )


def kl_estimate(log_ratio: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate of KL(pi, reference) from one token each that pi drew; `log_ratio` is
    log(pi / reference). Names as in http://joschu.net/blog/kl-approx.html."""
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    # Beyond the bound there is no gradient: with one of the two terms alone its sign is wrong.
    opposite = (-log_ratio).clamp(max=LOG_RATIO_BOUND)
    return torch.expm1(opposite) - opposite


def _proximal_share(lags: Tensor, dtype: torch.dtype) -> Tensor:
    """How far the proximal policy, one step older than pi, is on the way from mu to pi."""
    steps = lags.to(dtype)
    return (steps - 1.0).clamp(min=0.0) / steps.clamp(min=1.0)


def _at_level(difference: Tensor, mask: Tensor, rollout: Tensor, level: Level) -> Tensor:
    """log pi/mu [K]: of each token, or its mean over the trained tokens of the rollout."""
    if level == "token":
        return difference
    zeros = difference.new_zeros(int(rollout.max()) + 1)
    total = zeros.index_add(0, rollout, difference)  # 0 where masked
    count = zeros.index_add(0, rollout, mask.to(difference.dtype))
    return (total / count.clamp(min=1.0)).index_select(0, rollout)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _correction(mismatch: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """Factor of each token's loss, and where it is not simply pi/mu (truncate) or 1 (mask)."""
    if settings.mismatch_correction == "truncate":
        return mismatch.clamp(max=settings.mismatch_max), mismatch > settings.mismatch_max
    outside = (mismatch < settings.mismatch_min) | (mismatch > settings.mismatch_max)
    return (~outside).to(mismatch.dtype), outside


def _surrogate(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """Loss of each token, and where a bound cut the ratio or its gradient."""
    if settings.surrogate == "score":
        return -(advantages * logprobs), torch.zeros_like(ratio, dtype=torch.bool)
    bounded = ratio.clamp(settings.low, settings.high)
    outside = (ratio < settings.low) | (ratio > settings.high)
    if settings.surrogate == "detached_weight":
        return -(bounded.detach() * advantages * logprobs), outside
    if settings.surrogate == "clamped_ratio":
        return -(bounded * advantages), outside
    # With delta, a negative advantage does not push without bound however far r has grown.
    capped = ratio if math.isinf(settings.delta) else ratio.clamp(max=settings.delta)
    per_token = -torch.minimum(capped * advantages, bounded * advantages)
    beyond_delta = (ratio > settings.delta) & (advantages < 0.0)
    return per_token, (bounded * advantages < ratio * advantages) | beyond_delta
