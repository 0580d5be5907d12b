"""Loss, advantage and staleness."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from llamarl_hpc.config.blocks.base import Block


class AlgorithmConfig(Block):
    """Loss, advantage and staleness."""

    loss_type: Literal[
        "aipo",
        "aipo_clamp",
        "reinforce",
        "ppo",
        "grpo",
        "dr_grpo",
        "dapo",
        "decoupled_ppo",
        "cispo",
        "gspo",
    ] = Field(
        "aipo",
        description="Formulas in [algorithms.md](algorithms.md). `aipo`: one-sided truncated "
        "importance weight, detached. `aipo_clamp`: the same bound inside the gradient. "
        "`reinforce`: no weight. `ppo`, `grpo`, `dr_grpo`, `dapo`: two-sided clip; they differ in "
        "aggregation and bounds. `decoupled_ppo`: clip around the policy of the step before. "
        "`cispo`: clipped weight, detached. `gspo`: clip of whole sequences.",
    )
    rho: PositiveFloat = Field(
        4.0, description="Upper bound of the importance weight (aipo, aipo_clamp, decoupled_ppo)."
    )
    epsilon: PositiveFloat | None = Field(
        None,
        description="Lower bound of the ratio is 1 minus this; default: 0.2, cispo 1.0 (none), "
        "gspo 3e-4. Not for aipo and reinforce.",
    )
    epsilon_high: PositiveFloat | None = Field(
        None,
        description="Upper bound of the ratio is 1 plus this; default: `epsilon`, dapo 0.28, "
        "cispo 4.0, gspo 4e-4.",
    )
    delta: PositiveFloat | None = Field(
        None,
        description="Dual clip: bound of the ratio where the advantage is negative, for the "
        "losses with a two-sided clip; 3.0 is usual. Default: none.",
    )
    importance_sampling_level: Literal["token", "sequence"] | None = Field(
        None,
        description="The ratio is each token's, or the geometric mean over the rollout's trained "
        "tokens. Default: token, gspo sequence.",
    )
    mismatch_correction: Literal["none", "truncate", "mask"] = Field(
        "none",
        description="`truncate`: the loss of a token times the ratio up to `mismatch_max`, "
        "detached, instead of the loss's own use of the ratio (TIS). `mask`: no loss where the "
        "ratio is outside `mismatch_min` .. `mismatch_max` (IcePop).",
    )
    mismatch_level: Literal["token", "sequence"] = Field(
        "token", description="Ratio of `mismatch_correction`; as `importance_sampling_level`."
    )
    mismatch_min: NonNegativeFloat = Field(0.5, description="Of `mask`.")
    mismatch_max: PositiveFloat = Field(5.0, description="Of `truncate` and `mask`.")
    beta: NonNegativeFloat = Field(
        0.0,
        description="Weight of the KL divergence of the policy from a frozen reference (block "
        "`reference`); 0: none, and no reference is made.",
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k3",
        description="Of one token, with l = log(policy / reference): l; l^2 / 2; "
        "exp(-l) - 1 + l, which is never negative.",
    )
    kl_in: Literal["loss", "reward"] = Field(
        "loss",
        description="`loss`: `beta` times the estimate is added to the loss of every trained "
        "token (k2, k3). `reward`: its sum over a completion, with the policy that drew it, is "
        "taken off the reward (k1 has no bias there).",
    )
    entropy_coef: NonNegativeFloat = Field(
        0.0,
        description="Entropy bonus: this times the policy's entropy is taken off the loss of every "
        "trained token. Above 0 no rollout can be left out (`trainer.skip_zero_advantage`).",
    )
    loss_aggregation: (
        Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None
    ) = Field(
        None,
        description="Over all tokens of the batch; per rollout first; or per rollout by the "
        "fixed `max_completion_length`. Default: token-mean, grpo and gspo seq-mean-token-mean, "
        "dr_grpo seq-mean-token-sum-norm.",
    )
    advantage: Literal[
        "group_mean", "group_norm", "rloo", "reinforce_pp", "reinforce_pp_baseline"
    ] = Field(
        "group_mean",
        description="Reward minus the group's mean; the same over the group's standard "
        "deviation; minus the mean of the others (leave-one-out); or normalised over the whole "
        "batch, without or with the group's mean as baseline.",
    )
    truncated_completions: Literal["keep", "mask", "drop"] = Field(
        "keep",
        description="Completions that hit the length limit are trained like others; give no "
        "gradient but keep their place in the baseline; or count in neither.",
    )
    dynamic_sampling: bool = Field(
        False,
        description="Replace groups whose rewards are all equal by groups of new prompts.",
    )
    max_resamples: NonNegativeInt | None = Field(
        None,
        description="Groups that a step may replace; then it trains with what there is. Default: "
        "three times `rollout.prompts_per_step`.",
    )
    length_penalty: NonNegativeFloat = Field(
        0.0,
        description="Taken off the reward of a completion of `max_completion_length` tokens, and "
        "in proportion off that of a shorter one.",
    )
    overlong_buffer: NonNegativeInt = Field(
        0,
        description="Tokens before `max_completion_length` over which `overlong_penalty` grows "
        "from 0 to its value; 0: no such penalty.",
    )
    overlong_penalty: NonNegativeFloat = Field(
        1.0, description="Taken off the reward at the length limit, if `overlong_buffer` is set."
    )
    max_staleness: NonNegativeInt = Field(
        1,
        description="Optimizer steps by which the oldest token of a rollout may lag behind the "
        "trainer when it is consumed. 0: synchronous, on-policy. Kept by admission.",
    )
    in_flight_weight_updates: bool = Field(
        False,
        description="Switch weights in the middle of completions instead of between them.",
    )
