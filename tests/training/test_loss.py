"""Losses: values and gradients worked out by hand in float64, and numbers that must stay finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from llamarl_hpc.training.loss import LossSettings, LossSums, policy_loss

LOGP = [-1.0, -2.0, -0.5, -3.0]
RATIOS = [1.0, 3.0, 0.5, 1.1]
ADVANTAGES = [1.0, 2.0, -1.0, -2.0]


def evaluate(
    settings: LossSettings,
    *,
    logp: list[float] = LOGP,
    ratios: list[float] = RATIOS,
    advantages: list[float] = ADVANTAGES,
    weights: list[float] | None = None,
) -> tuple[float, list[float], LossSums]:
    """Loss, its gradient with respect to logp, and the figures."""
    logprobs = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    ratio = torch.tensor(ratios, dtype=torch.float64)
    loss, figures = policy_loss(
        logprobs,
        logprobs.detach() - ratio.log(),
        torch.tensor(advantages, dtype=torch.float64),
        torch.tensor(weights or [0.25] * len(logp), dtype=torch.float64),
        torch.ones(len(logp), dtype=torch.float64),
        settings=settings,
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), gradient.tolist(), figures


def test_aipo_truncates_the_weight_and_does_not_differentiate_it() -> None:
    loss, gradient, figures = evaluate(LossSettings(loss_type="aipo", rho=2.0))
    # weights 1, min(3, 2) = 2, 0.5, 1.1; -(w A logp) / 4
    assert loss == pytest.approx(-(1 * -1 + 2 * 2 * -2 + 0.5 * -1 * -0.5 + 1.1 * -2 * -3) / 4)
    assert gradient == pytest.approx([-1 / 4, -4 / 4, 0.5 / 4, 2.2 / 4])
    assert figures.metrics()["clip_frac"] == 0.25


def test_aipo_clamp_has_no_gradient_above_rho() -> None:
    loss, gradient, figures = evaluate(LossSettings(loss_type="aipo_clamp", rho=2.0))
    assert loss == pytest.approx(-(1 * 1 + 2 * 2 + 0.5 * -1 + 1.1 * -2) / 4)
    assert gradient == pytest.approx([-1 / 4, 0.0, 0.5 / 4, 2.2 / 4])
    assert figures.metrics()["clip_frac"] == 0.25


def test_reinforce_ignores_the_ratio() -> None:
    loss, gradient, figures = evaluate(LossSettings(loss_type="reinforce"))
    assert loss == pytest.approx(-(-1.0 - 4.0 + 0.5 + 6.0) / 4)
    assert gradient == pytest.approx([-1 / 4, -2 / 4, 1 / 4, 2 / 4])
    assert figures.metrics()["clip_frac"] == 0.0


def test_ppo_clips_on_both_sides_and_only_where_that_is_pessimistic() -> None:
    settings = LossSettings(loss_type="ppo", epsilon=0.2, epsilon_high=0.28)
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


def test_on_policy_all_losses_have_the_gradient_of_reinforce() -> None:
    gradients = [
        evaluate(LossSettings(loss_type=kind), ratios=[1.0] * 4)[1]  # type: ignore[arg-type]
        for kind in ("aipo", "aipo_clamp", "reinforce", "ppo")
    ]
    for gradient in gradients:
        assert gradient == pytest.approx([-1 / 4, -2 / 4, 1 / 4, 2 / 4])


def test_weights_are_the_aggregation() -> None:
    loss, gradient, _ = evaluate(LossSettings(loss_type="reinforce"), weights=[0.5, 0.25, 0.0, 0.1])
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
        settings=LossSettings(loss_type=kind, rho=2.0),  # type: ignore[arg-type]
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


@pytest.mark.parametrize("kind", ["aipo_clamp", "reinforce", "ppo"])
def test_extreme_ratios_keep_every_loss_finite(kind: str) -> None:
    loss, gradient, _ = extreme(torch.float32, kind)
    assert torch.isfinite(loss) and torch.isfinite(gradient).all()
    assert gradient[4:].tolist() == [0.0, 0.0]


def test_metrics_by_hand() -> None:
    metrics = evaluate(LossSettings(loss_type="aipo", rho=2.0))[2].metrics()
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
    settings = LossSettings(loss_type="ppo")
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
    _, gradient, figures = evaluate(LossSettings(), weights=[0.0] * 4)
    assert gradient == [0.0] * 4
    assert set(figures.metrics().values()) == {0.0}
