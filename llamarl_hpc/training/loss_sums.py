"""Figures of a loss that add up exactly over micro-batches and ranks, and the metrics they make."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# What is summed over tokens; the order of `LossSums.sums`.
SUMS = (
    "tokens",  # that were trained
    "loss",
    "ratio",
    "ratio_squared",
    "clipped",
    "corrected",  # by algorithm.mismatch_correction
    "bounded",  # by LOG_RATIO_BOUND
    "mismatch_kl",
    "abs_diff",
    "entropy",
    "kl",  # of the policy from the reference
    "referred",  # tokens with a KL term
)


@dataclass(frozen=True, kw_only=True)
class LossSums:
    """Figures of some tokens that add up: over micro-batches by `+`, over ranks likewise."""

    sums: Tensor  # float64 [len(SUMS)]
    maxima: Tensor  # float64 [2], largest ratio and largest |logp - logp_mu|

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(
            sums=self.sums + other.sums, maxima=torch.maximum(self.maxima, other.maxima)
        )

    @property
    def loss(self) -> float:
        return float(self.sums[SUMS.index("loss")])

    def metrics(self) -> dict[str, float]:
        """Averages over trained tokens; all 0.0 when there were none.

        `ess` is the effective sample size (sum r)^2 / sum r^2 as a share of the tokens: 1.0 on
        policy, near 0 when a few tokens carry all weight. `mismatch/kl` estimates
        KL(mu || pi) by r - 1 - log r, which is never negative. `kl` is there with a KL term only.
        """
        values = dict(zip(SUMS, self.sums.tolist(), strict=True))
        num_tokens = values["tokens"]
        divisor = max(num_tokens, 1.0)
        ratio_max, abs_diff_max = self.maxima.tolist()
        divergence = {"kl": values["kl"] / values["referred"]} if values["referred"] else {}
        return {
            "loss": values["loss"],
            "is_ratio/mean": values["ratio"] / divisor,
            "is_ratio/max": ratio_max,
            "is_ratio/bounded_frac": values["bounded"] / divisor,
            "clip_frac": values["clipped"] / divisor,
            "ess": values["ratio"] ** 2 / (values["ratio_squared"] * divisor)
            if num_tokens
            else 0.0,
            "mismatch/kl": values["mismatch_kl"] / divisor,
            "mismatch/logprob_abs_diff": values["abs_diff"] / divisor,
            "mismatch/logprob_abs_diff_max": abs_diff_max,
            "mismatch/corrected_frac": values["corrected"] / divisor,
            "entropy": values["entropy"] / divisor,
            "tokens/trained": num_tokens,
            **divergence,
        }
