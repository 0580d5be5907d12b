"""Losses: values and gradients worked out by hand in float64, and numbers that must stay finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from llamarl_hpc.config.losses import PRESETS, LossSettings
from llamarl_hpc.config.schema import AlgorithmConfig
from llamarl_hpc.training.loss import kl_estimate, policy_loss
from llamarl_hpc.training.loss_sums import LossSums

LOGP = [-1.0, -2.0, -0.5, -3.0]
RATIOS = [1.0, 3.0, 0.5, 1.1]
ADVANTAGES = [1.0, 2.0, -1.0, -2.0]


def loss_of(loss_type: str = "aipo", **keys: Any) -> LossSettings:
    """As the configuration gives it."""
    return LossSettings.of(AlgorithmConfig.model_validate({"loss_type": loss_type, **keys}))


def evaluate(
    settings: LossSettings,
    *,
    logp: list[float] = LOGP,
    ratios: list[float] = RATIOS,
    advantages: list[float] = ADVANTAGES,
    weights: list[float] | None = None,
    rollout: list[int] | None = None,
    lags: list[int] | None = None,
    reference: list[float] | None = None,
) -> tuple[float, list[float], LossSums]:
    """Loss, its gradient with respect to logp, and the figures. Entropies are 1, lags are 1.

    `reference` are the ratios policy / reference.
    """
    logprobs = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    ratio = torch.tensor(ratios, dtype=torch.float64)
    loss, figures = policy_loss(
        logprobs,
        logprobs.detach() - ratio.log(),
        torch.tensor(advantages, dtype=torch.float64),
        torch.tensor(weights or [0.25] * len(logp), dtype=torch.float64),
        torch.ones(len(logp), dtype=torch.float64),
        torch.tensor(rollout or [0] * len(logp)),
        reference=logprobs.detach()
        - torch.tensor(reference or [1.0] * len(logp), dtype=torch.float64).log(),
        lags=torch.tensor(lags or [1] * len(logp)),
        settings=settings,
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), gradient.tolist(), figures


def test_aipo_truncates_the_weight_and_does_not_differentiate_it() -> None:
    loss, gradient, figures = evaluate(loss_of("aipo", rho=2.0))
    # weights 1, min(3, 2) = 2, 0.5, 1.1; -(w A logp) / 4
    assert loss == pytest.approx(-(1 * -1 + 2 * 2 * -2 + 0.5 * -1 * -0.5 + 1.1 * -2 * -3) / 4)
    assert gradient == pytest.approx([-1 / 4, -4 / 4, 0.5 / 4, 2.2 / 4])
    assert figures.metrics()["clip_frac"] == 0.25


def test_aipo_clamp_has_no_gradient_above_rho() -> None:
    loss, gradient, figures = evaluate(loss_of("aipo_clamp", rho=2.0))
    assert loss == pytest.approx(-(1 * 1 + 2 * 2 + 0.5 * -1 + 1.1 * -2) / 4)
    assert gradient == pytest.approx([-1 / 4, 0.0, 0.5 / 4, 2.2 / 4])
    assert figures.metrics()["clip_frac"] == 0.25


def test_reinforce_ignores_the_ratio() -> None:
    loss, gradient, figures = evaluate(loss_of("reinforce"))
    assert loss == pytest.approx(-(-1.0 - 4.0 + 0.5 + 6.0) / 4)
    assert gradient == pytest.approx([-1 / 4, -2 / 4, 1 / 4, 2 / 4])
    assert figures.metrics()["clip_frac"] == 0.0


def test_ppo_clips_on_both_sides_and_only_where_that_is_pessimistic() -> None:
    settings = loss_of("ppo", epsilon=0.2, epsilon_high=0.28)
    loss, gradient, figures = evaluate(
        settings,
        logp=[-1.0] * 5,
        ratios=[1.0, 3.0, 0.5, 0.5, 3.0],
        advantages=[1.0, 2.0, -1.0, 1.0, -1.0],
        weights=[0.2] * 5,
    )
    # 3.0 with A > 0 -> 1.28; 0.5 with A < 0 -> 0.8; 0.5 with A > 0 and 3.0 with A < 0 stay
    assert loss == pytest.approx(-(1.0 + 1.28 * 2 - 0.8 + 0.5 - 3.0) / 5)
    assert gradient == pytest.approx([-1 / 5, 0.0, 0.0, -0.5 / 5, 3.0 / 5])
    assert figures.metrics()["clip_frac"] == pytest.approx(2 / 5)


def test_delta_bounds_the_push_of_a_negative_advantage() -> None:
    loss, gradient, figures = evaluate(
        loss_of("ppo", delta=2.0),
        logp=[-1.0] * 5,
        ratios=[5.0, 1.5, 5.0, 0.5, 1.0],
        advantages=[-1.0, -1.0, 1.0, -1.0, -2.0],
        weights=[0.2] * 5,
    )
    # A < 0: 5.0 -> 2.0, 1.5 stays, 0.5 -> 0.8; A > 0 is clipped at 1.2 as ever
    assert loss == pytest.approx(-(-2.0 - 1.5 + 1.2 - 0.8 - 2.0) / 5)
    assert gradient == pytest.approx([0.0, 1.5 / 5, 0.0, 0.0, 2.0 / 5])
    assert figures.metrics()["clip_frac"] == pytest.approx(3 / 5)


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    # default: 0 to 5; then 1 - 0.4 to 1 + 1
    loss, gradient, figures = evaluate(loss_of("cispo"), ratios=[1.0, 7.0, 0.1, 1.1])
    assert loss == pytest.approx(-(1 * -1 + 5 * 2 * -2 + 0.1 * -1 * -0.5 + 1.1 * -2 * -3) / 4)
    assert gradient == pytest.approx([-1 / 4, -10 / 4, 0.1 / 4, 2.2 / 4])
    assert figures.metrics()["clip_frac"] == 0.25
    _, gradient, figures = evaluate(loss_of("cispo", epsilon=0.4, epsilon_high=1.0))
    assert gradient == pytest.approx([-1 / 4, -2 * 2 / 4, 0.6 / 4, 2.2 / 4])
    assert figures.metrics()["clip_frac"] == 0.5


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo"])
def test_presets_of_the_two_sided_clip_differ_from_ppo_in_bounds_and_aggregation(kind: str) -> None:
    ours = evaluate(loss_of(kind, epsilon=0.2, epsilon_high=0.28))
    theirs = evaluate(loss_of("ppo", epsilon=0.2, epsilon_high=0.28))
    assert ours[:2] == theirs[:2]
    aggregations = {
        "grpo": "seq-mean-token-mean",
        "dr_grpo": "seq-mean-token-sum-norm",
        "dapo": "token-mean",
    }
    assert loss_of(kind).aggregation == aggregations[kind]
    assert loss_of(kind, loss_aggregation="token-mean").aggregation == "token-mean"
    high = 1.28 if kind == "dapo" else 1.2
    assert (loss_of(kind).low, loss_of(kind).high) == pytest.approx((0.8, high))
    assert loss_of(kind, epsilon=0.1).high == pytest.approx(1.28 if kind == "dapo" else 1.1)


def test_gspo_clips_the_geometric_mean_of_a_rollout() -> None:
    settings = loss_of("gspo", epsilon=0.1, epsilon_high=0.2)
    loss, gradient, figures = evaluate(
        settings,
        logp=[-1.0, -2.0, -3.0, -1.0, -1.0, -1.0],
        ratios=[1.1, 1.21, 2.0, 4.0, 0.5, 9.0],
        advantages=[2.0, 2.0, 1.0, 1.0, -1.0, -1.0],
        weights=[0.1, 0.2, 0.25, 0.25, 0.2, 0.0],
        rollout=[0, 0, 1, 1, 2, 2],
    )
    # rollouts: sqrt(1.1 * 1.21) = 1.1^1.5; sqrt(8) above 1.2; 0.5 below 0.9 (the 9 is masked)
    first = 1.1**1.5
    assert loss == pytest.approx(-(0.3 * first * 2 + 0.5 * 1.2 * 1 - 0.2 * 0.9 * 1))
    # d s / d logp_t = s / 2 for either token, whatever its own weight
    assert gradient == pytest.approx([-0.3 * 2 * first / 2] * 2 + [0.0] * 4)
    metrics = figures.metrics()
    assert metrics["clip_frac"] == pytest.approx(3 / 5)
    assert metrics["is_ratio/mean"] == pytest.approx((2 * first + 2 * 8**0.5 + 0.5) / 5)
    assert metrics["mismatch/logprob_abs_diff"] == pytest.approx(
        math.log(1.1 * 1.21 * 2 * 4 * 2) / 5  # still of tokens
    )


def test_aipo_at_the_level_of_sequences_truncates_their_mean() -> None:
    settings = loss_of("aipo", rho=2.0, importance_sampling_level="sequence")
    loss, gradient, _ = evaluate(
        settings, ratios=[1.0, 4.0, 3.0, 3.0], advantages=[1, 1, -1, -1], rollout=[0, 0, 1, 1]
    )
    assert loss == pytest.approx(-(2 * -1 + 2 * -2 - 2 * -0.5 - 2 * -3) / 4)
    assert gradient == pytest.approx([-2 / 4, -2 / 4, 2 / 4, 2 / 4])


RATIO_LOSSES = [
    kind
    for kind, row in PRESETS.items()
    if row.surrogate == "clipped_ratio" and not row.is_decoupled
]


@pytest.mark.parametrize("kind", ["reinforce", *RATIO_LOSSES])
def test_truncation_makes_every_loss_pull_like_aipo(kind: str) -> None:
    settings = loss_of(kind, mismatch_correction="truncate", mismatch_max=2.0)
    loss, gradient, figures = evaluate(settings, rollout=[0, 1, 2, 3])
    assert gradient == pytest.approx([-1 / 4, -4 / 4, 0.5 / 4, 2.2 / 4])
    assert gradient == pytest.approx(evaluate(loss_of("aipo", rho=2.0))[1])
    if kind != "reinforce":  # value: weight times the ratio 1 times A
        assert loss == pytest.approx(-(1 * 1 + 2 * 2 - 0.5 * 1 - 1.1 * 2) / 4)
    metrics = figures.metrics()
    assert metrics["clip_frac"] == 0.0
    assert metrics["mismatch/corrected_frac"] == 0.25
    assert metrics["is_ratio/mean"] == pytest.approx(5.6 / 4)


def test_truncation_holds_beyond_the_numerical_bound_of_the_ratio() -> None:
    settings = loss_of("ppo", mismatch_correction="truncate", mismatch_max=2.0)
    _, gradient, _ = evaluate(settings, ratios=[math.exp(30)] * 4, rollout=[0, 1, 2, 3])
    assert gradient == pytest.approx([-2 / 4, -4 / 4, 2 / 4, 4 / 4])


def test_the_band_mask_takes_tokens_out_and_leaves_the_others_as_they_are() -> None:
    band = {"mismatch_correction": "mask", "mismatch_min": 0.6, "mismatch_max": 2.0}
    loss, gradient, figures = evaluate(loss_of("aipo", **band))
    assert loss == pytest.approx(-(1 * -1 + 1.1 * -2 * -3) / 4)
    assert gradient == pytest.approx([-1 / 4, 0.0, 0.0, 2.2 / 4])
    assert figures.metrics()["mismatch/corrected_frac"] == 0.5
    assert figures.metrics()["tokens/trained"] == 4.0
    _, gradient, _ = evaluate(loss_of("reinforce", **band))
    assert gradient == pytest.approx([-1 / 4, 0.0, 0.0, 2 / 4])


def test_the_band_mask_takes_whole_rollouts_out() -> None:
    settings = loss_of("aipo", mismatch_correction="mask", mismatch_level="sequence")
    _, gradient, figures = evaluate(
        settings, ratios=[0.1, 0.3, 8.0, 2.0], advantages=[1.0] * 4, rollout=[0, 0, 1, 1]
    )
    # means sqrt(0.03) = 0.17 and sqrt(16) = 4; the band is 0.5 to 5, the weight's bound 4
    assert gradient == pytest.approx([0.0, 0.0, -4 / 4, -2 / 4])
    assert figures.metrics()["mismatch/corrected_frac"] == 0.5


def test_the_entropy_bonus_counts_with_the_weights_of_the_loss() -> None:
    logprobs = torch.tensor(LOGP, dtype=torch.float64, requires_grad=True)
    entropy = torch.tensor([0.5, 1.0, 2.0, math.nan], dtype=torch.float64, requires_grad=True)
    loss, figures = policy_loss(
        logprobs,
        logprobs.detach(),
        torch.zeros(4),
        torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64),
        entropy,
        torch.tensor([0, 0, 1, 1]),
        settings=loss_of("grpo", entropy_coef=0.1),
    )
    assert loss.item() == pytest.approx(-0.1 * (0.5 * 0.5 + 0.3 * 1.0 + 0.2 * 2.0))
    assert figures.loss == pytest.approx(loss.item())
    of_logprobs, of_entropy = torch.autograd.grad(loss, [logprobs, entropy])
    assert of_logprobs.tolist() == [0.0] * 4
    assert of_entropy.tolist() == pytest.approx([-0.05, -0.03, -0.02, 0.0])


def test_decoupled_ppo_clips_around_the_version_before_and_weighs_by_its_distance() -> None:
    settings = loss_of("decoupled_ppo", epsilon=0.2, epsilon_high=0.28, rho=4.0)
    loss, gradient, figures = evaluate(
        settings,
        logp=[-1.0] * 6,
        ratios=[1.21, 1.5, 8.0, 0.25, 1.1, 1000.0],
        advantages=[1.0, 2.0, 1.0, -1.0, -3.0, 1.0],
        weights=[0.1] * 6,
        lags=[2, 1, 3, 2, 0, 3],
    )
    # proximal / mu = r^((lag-1)/lag), pi / proximal = r^(1/lag); lag 0 counts as 1
    # 1.1 * 1.1;  1 * clip(1.5) = 1.28;  4 * clip(2) = 1.28;  0.5 * clip(0.5) = 0.8;  1 * 1.1;
    # 100 -> 4, and clip(10) = 1.28
    parts = [1.1 * 1.1, 1.28 * 2, 4 * 1.28, -0.5 * 0.8, -3 * 1.1, 4 * 1.28]
    assert loss == pytest.approx(-sum(parts) / 10)
    assert gradient == pytest.approx([-0.121, 0.0, 0.0, 0.0, 0.33, 0.0])
    metrics = figures.metrics()
    assert metrics["clip_frac"] == pytest.approx(4 / 6)
    assert metrics["is_ratio/mean"] == pytest.approx((1.21 + 1.5 + 8 + 0.25 + 1.1 + 1000) / 6)
    # proximal / mu is 1.1^23 = 9, cut at 4; pi / proximal is 1.1, within the clip
    _, gradient, figures = evaluate(
        settings, logp=[-1.0], ratios=[1.1**24], advantages=[1.0], weights=[1.0], lags=[24]
    )
    assert gradient == pytest.approx([-4 * 1.1])
    assert figures.metrics()["clip_frac"] == 1.0


def test_decoupled_ppo_of_data_one_step_old_is_ppo() -> None:
    ours, theirs = evaluate(loss_of("decoupled_ppo")), evaluate(loss_of("ppo"))
    assert ours[:2] == theirs[:2]
    assert ours[2].metrics() == theirs[2].metrics()


# log(policy / reference) = 0, 0.5, -0.5, and -60: the reference likes the last token much better
REFERENCE = [1.0, math.exp(0.5), math.exp(-0.5), math.exp(-60)]
FAR = math.exp(20) - 1 - 20  # the exponent is bounded
KL = {
    "k1": ([0.0, 0.5, -0.5, -60.0], [1.0, 1.0, 1.0, 1.0]),
    "k2": ([0.0, 0.125, 0.125, 1800.0], [0.0, 0.5, -0.5, -60.0]),
    "k3": (
        [0.0, math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5, FAR],
        [0.0, 1 - math.exp(-0.5), 1 - math.exp(0.5), 0.0],
    ),
}


@pytest.mark.parametrize("estimator", KL)
def test_the_kl_term_adds_beta_times_its_estimate(estimator: str) -> None:
    settings = loss_of("aipo", beta=0.5, kl_estimator=estimator)
    loss, gradient, figures = evaluate(settings, reference=REFERENCE)
    without = evaluate(loss_of("aipo"), reference=REFERENCE)
    values, slopes = KL[estimator]
    assert loss - without[0] == pytest.approx(0.5 * sum(values) / 4, rel=1e-12)
    change = [a - b for a, b in zip(gradient, without[1], strict=True)]
    assert change == pytest.approx([0.5 * slope / 4 for slope in slopes], abs=1e-12)
    assert figures.metrics()["kl"] == pytest.approx(sum(values) / 4)
    assert "kl" not in without[2].metrics()


def test_k3_is_never_negative_and_never_infinite() -> None:
    log_ratio = torch.linspace(-700.0, 700.0, 2001, dtype=torch.float64)
    values = kl_estimate(log_ratio, "k3")
    assert (values >= 0.0).all() and torch.isfinite(values).all()
    assert (kl_estimate(log_ratio.float(), "k3") >= 0.0).all()


def test_the_kl_term_counts_with_the_weights_of_the_loss_and_whatever_the_correction() -> None:
    settings = loss_of("aipo", beta=1.0, kl_estimator="k2", mismatch_correction="mask")
    _, gradient, figures = evaluate(
        settings,
        ratios=[1.0, 100.0, 1.0, 1.0],
        advantages=[0.0] * 4,
        weights=[0.5, 0.3, 0.2, 0.0],
        reference=[math.e] * 4,
    )
    assert gradient == pytest.approx([0.5, 0.3, 0.2, 0.0])
    assert figures.metrics()["kl"] == pytest.approx(0.5)
    in_reward = loss_of("aipo", beta=1.0, kl_in="reward")
    assert evaluate(in_reward, reference=REFERENCE)[:2] == evaluate(loss_of("aipo"))[:2]


@pytest.mark.parametrize("kind", PRESETS)
def test_a_rollout_without_advantage_has_no_gradient_at_all(kind: str) -> None:
    truncates = kind in RATIO_LOSSES or kind == "reinforce"
    for correction in ("none", "mask", *(["truncate"] if truncates else [])):
        _, gradient, _ = evaluate(
            loss_of(kind, mismatch_correction=correction),
            advantages=[0.0, 1.0, 0.0, 1.0],
            rollout=[0, 1, 0, 1],
        )
        assert gradient[0] == gradient[2] == 0.0


def test_on_policy_all_losses_have_the_gradient_of_reinforce() -> None:
    gradients = [
        evaluate(loss_of(kind), ratios=[1.0] * 4, rollout=[0, 1, 2, 3])[1] for kind in PRESETS
    ]
    for gradient in gradients:
        assert gradient == pytest.approx([-1 / 4, -2 / 4, 1 / 4, 2 / 4])


def test_weights_are_the_aggregation() -> None:
    loss, gradient, _ = evaluate(loss_of("reinforce"), weights=[0.5, 0.25, 0.0, 0.1])
    assert loss == pytest.approx(-(0.5 * -1 + 0.25 * -4 + 0.1 * 6))
    assert gradient == pytest.approx([-0.5, -0.5, 0.0, 0.2])


def extreme(dtype: torch.dtype, kind: str) -> tuple[Tensor, Tensor, LossSums]:
    """log-ratios 0, 50, 800, -800, and masked tokens of nan and inf."""
    logprobs = torch.tensor([-1.0, -1, -1, -801, math.nan, -1], dtype=dtype, requires_grad=True)
    loss, figures = policy_loss(
        logprobs,
        torch.tensor([-1.0, -51, -801, -1, -1, -math.inf], dtype=dtype),
        torch.tensor([1.0, 0, 1, 1, 0, 0], dtype=dtype),
        torch.tensor([0.25, 0.25, 0.25, 0.25, 0, 0], dtype=torch.float64),
        torch.zeros(6, dtype=dtype),
        torch.tensor([0, 0, 1, 1, 1, 2]),
        reference=torch.tensor([-1.0, -801, -1, -801, math.nan, math.inf], dtype=dtype),
        lags=torch.tensor([1, 2, 3, 4, 5, 6]),
        settings=loss_of(kind, rho=2.0, beta=0.0 if kind == "aipo" else 1e-3),
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss, gradient, figures


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_ratios_give_the_exact_finite_value(dtype: torch.dtype) -> None:
    loss, gradient, figures = extreme(dtype, "aipo")
    tiny = math.exp(-20)
    assert loss.item() == pytest.approx(-(-1.0 + 0 + 2 * -1.0 + tiny * -801) / 4, rel=1e-6)
    expected = [-1 / 4, 0.0, -2 / 4, -tiny / 4, 0.0, 0.0]
    assert gradient.tolist() == pytest.approx(expected, rel=1e-6)
    metrics = figures.metrics()
    assert metrics["is_ratio/bounded_frac"] == 0.75
    assert metrics["is_ratio/max"] == pytest.approx(math.exp(20), rel=1e-5)
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("kind", [kind for kind in PRESETS if kind != "aipo"])
def test_extreme_ratios_keep_every_loss_finite(kind: str) -> None:
    loss, gradient, _ = extreme(torch.float32, kind)
    assert torch.isfinite(loss) and torch.isfinite(gradient).all()
    assert gradient[4:].tolist() == [0.0, 0.0]


def test_metrics_by_hand() -> None:
    metrics = evaluate(loss_of("aipo", rho=2.0))[2].metrics()
    logs = [math.log(r) for r in RATIOS]
    assert metrics["is_ratio/mean"] == pytest.approx(5.6 / 4)
    assert metrics["is_ratio/max"] == pytest.approx(3.0)
    assert metrics["ess"] == pytest.approx(5.6**2 / (1 + 9 + 0.25 + 1.21) / 4)
    kl = sum(r - 1 - log for r, log in zip(RATIOS, logs, strict=True)) / 4
    assert metrics["mismatch/kl"] == pytest.approx(kl)
    assert metrics["mismatch/logprob_abs_diff"] == pytest.approx(sum(map(abs, logs)) / 4)
    assert metrics["mismatch/logprob_abs_diff_max"] == pytest.approx(math.log(3))
    assert metrics["entropy"] == 1.0
    assert metrics["tokens/trained"] == 4.0


def test_figures_of_parts_add_up_to_those_of_the_whole() -> None:
    settings = loss_of("ppo")
    whole = evaluate(settings)[2].metrics()
    parts: list[Any] = [
        evaluate(
            settings,
            logp=LOGP[part],
            ratios=RATIOS[part],
            advantages=ADVANTAGES[part],
            weights=[0.25] * len(LOGP[part]),
        )
        for part in (slice(0, 1), slice(1, 4))
    ]
    together = (parts[0][2] + parts[1][2]).metrics()
    assert together == pytest.approx(whole, rel=1e-14)
    assert parts[0][0] + parts[1][0] == pytest.approx(whole["loss"], rel=1e-14)


def test_nothing_to_train_gives_zeros_and_not_nan() -> None:
    _, gradient, figures = evaluate(loss_of(), weights=[0.0] * 4)
    assert gradient == [0.0] * 4
    assert set(figures.metrics().values()) == {0.0}
