"""The policy losses, as functions of tensors: no model, no ranks.

    aipo         -w * A * logp          w = min(pi/mu, rho), not differentiated
    aipo_clamp   -min(pi/mu, rho) * A   the bound inside the gradient: none above rho
    reinforce    -A * logp
    ppo          -min(r * A, clip(r, 1 - epsilon, 1 + epsilon_high) * A)   with r = pi/mu

pi is the policy that is trained, mu the one that sampled. The weight of AIPO is one-sided because
mu is not the previous iterate but an old policy: the ratio corrects for that, and only its upper
tail is dangerous (LlamaRL, arXiv 2505.24034). Letters: K tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from llamarl_hpc.batching.packing import MicroBatch
from llamarl_hpc.config.schema import AlgorithmConfig

LossType = Literal["aipo", "aipo_clamp", "reinforce", "ppo"]

LOG_RATIO_BOUND = 20.0  # exp(20) = 5e8: far beyond any bound of a weight, far below overflow

# What is summed over tokens; the order of `LossSums.sums`.
_SUMS = (
    "tokens",  # that were trained
    "loss",
    "ratio",
    "ratio_squared",
    "clipped",
    "bounded",  # by LOG_RATIO_BOUND
    "kl",
    "abs_diff",
    "entropy",
)


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """Which loss, and its bounds."""

    loss_type: LossType = "aipo"
    rho: float = 4.0
    epsilon: float = 0.2
    epsilon_high: float = 0.2

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> LossSettings:
        high = algorithm.epsilon_high
        return cls(
            loss_type=algorithm.loss_type,
            rho=algorithm.rho,
            epsilon=algorithm.epsilon,
            epsilon_high=algorithm.epsilon if high is None else high,
        )


@dataclass(frozen=True, kw_only=True)
class LossSums:
    """Figures of some tokens that add up: over micro-batches by `+`, over ranks likewise."""

    sums: Tensor  # float64 [len(_SUMS)]
    maxima: Tensor  # float64 [2], largest ratio and largest |logp - logp_mu|

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(
            sums=self.sums + other.sums, maxima=torch.maximum(self.maxima, other.maxima)
        )

    @property
    def loss(self) -> float:
        return float(self.sums[_SUMS.index("loss")])

    def metrics(self) -> dict[str, float]:
        """Averages over trained tokens; all 0.0 when there were none.

        `ess` is the effective sample size (sum r)^2 / sum r^2 as a share of the tokens: 1.0 on
        policy, near 0 when a few tokens carry all weight. `mismatch/kl` estimates
        KL(mu || pi) by r - 1 - log r, which is never negative.
        """
        values = dict(zip(_SUMS, self.sums.tolist(), strict=True))
        num_tokens = values["tokens"]
        divisor = max(num_tokens, 1.0)
        ratio_max, abs_diff_max = self.maxima.tolist()
        return {
            "loss": values["loss"],
            "is_ratio/mean": values["ratio"] / divisor,
            "is_ratio/max": ratio_max,
            "is_ratio/bounded_frac": values["bounded"] / divisor,
            "clip_frac": values["clipped"] / divisor,
            "ess": values["ratio"] ** 2 / (values["ratio_squared"] * divisor)
            if num_tokens
            else 0.0,
            "mismatch/kl": values["kl"] / divisor,
            "mismatch/logprob_abs_diff": values["abs_diff"] / divisor,
            "mismatch/logprob_abs_diff_max": abs_diff_max,
            "entropy": values["entropy"] / divisor,
            "tokens/trained": num_tokens,
        }


def policy_loss(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    weights: Tensor,
    entropy: Tensor,
    *,
    settings: LossSettings,
) -> tuple[Tensor, LossSums]:
    """Loss (a scalar that adds up over micro-batches and ranks) and its figures.

    All tensors are [K]. `weights` are the tokens' shares in the loss of the global batch: they
    hold its denominators and its mask (see `batching.packing.token_weights`). Where a weight is 0
    the other values may be anything, even nan: they are replaced before any arithmetic.
    """
    zero = torch.zeros_like(logprobs)
    mask = weights > 0
    logprobs = torch.where(mask, logprobs, zero)
    behaviour = torch.where(mask, behaviour.to(logprobs.dtype), zero)
    advantages = torch.where(mask, advantages.to(logprobs.dtype), zero)
    weights = weights.to(logprobs.dtype)

    difference = logprobs - behaviour
    log_ratio = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    per_token, clipped = _per_token(logprobs, ratio, advantages, settings)
    loss = (weights * per_token).sum()
    with torch.no_grad():
        columns = (
            torch.ones_like(ratio),
            weights * per_token,
            ratio,
            ratio.square(),
            clipped.to(ratio.dtype),
            (difference.abs() > LOG_RATIO_BOUND).to(ratio.dtype),
            ratio - 1.0 - log_ratio,
            difference.abs(),
            entropy.to(ratio.dtype),
        )
        table = torch.where(mask, torch.stack(columns).double(), 0.0)
        maxima = torch.stack([ratio, difference.abs()]).double()
        figures = LossSums(sums=table.sum(dim=1), maxima=torch.where(mask, maxima, 0.0).amax(dim=1))
    return loss, figures


def micro_batch_loss(
    micro_batch: MicroBatch, logprobs: Tensor, entropy: Tensor, *, settings: LossSettings
) -> tuple[Tensor, LossSums]:
    """`policy_loss` of a micro-batch, given what the policy says about its tokens, [K] each."""
    device = logprobs.device
    return policy_loss(
        logprobs,
        torch.from_numpy(micro_batch.logprobs).to(device),
        torch.from_numpy(micro_batch.advantages).to(device),
        torch.from_numpy(micro_batch.weights).to(device),
        entropy,
        settings=settings,
    )


def _per_token(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """Loss of each token, and where a bound cut the ratio or its gradient."""
    if settings.loss_type == "aipo":
        weight = ratio.clamp(max=settings.rho).detach()
        return -(weight * advantages * logprobs), ratio > settings.rho
    if settings.loss_type == "aipo_clamp":
        return -(ratio.clamp(max=settings.rho) * advantages), ratio > settings.rho
    if settings.loss_type == "reinforce":
        return -(advantages * logprobs), torch.zeros_like(ratio, dtype=torch.bool)
    bounded = ratio.clamp(1.0 - settings.epsilon, 1.0 + settings.epsilon_high)
    per_token = -torch.minimum(ratio * advantages, bounded * advantages)
    return per_token, bounded * advantages < ratio * advantages
