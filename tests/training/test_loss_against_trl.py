"""The losses that TRL has, too, on the same tensors: values and gradients of its GRPOTrainer."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from llamarl_hpc.batching.packing import token_weights
from llamarl_hpc.config.losses import LossSettings
from llamarl_hpc.config.schema import AlgorithmConfig
from llamarl_hpc.training.loss import policy_loss
from llamarl_hpc.types import TrainBatch

grpo_trainer = pytest.importorskip(
    "trl.trainer.grpo_trainer", reason="trl is not installed (pip install trl==1.16.0)"
)

ROWS, LENGTH, MAX_LENGTH = 6, 9, 16
LENGTHS = [9, 1, 4, 7, 2, 5]
MASK = torch.tensor([[t < length for t in range(LENGTH)] for length in LENGTHS])


def tensors() -> dict[str, Tensor]:
    """Per token [ROWS, LENGTH], float64: log-probs of both policies, entropies; and advantages."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * std

    logprobs = -2.0 + normal(ROWS, LENGTH, std=0.5)
    return {
        "logprobs": logprobs,
        "behaviour": logprobs + normal(ROWS, LENGTH, std=0.3),
        "entropy": 2.0 + normal(ROWS, LENGTH, std=0.2),
        "advantages": normal(ROWS, std=1.0),
        "reference": logprobs + normal(ROWS, LENGTH, std=0.3),
    }


def ours(**algorithm: Any) -> tuple[float, Tensor, Tensor]:
    """Loss, and its gradients with respect to log-probs and entropies, [ROWS, LENGTH]."""
    given = tensors()
    settings = LossSettings.of(AlgorithmConfig.model_validate(algorithm))
    rows = torch.arange(ROWS)[:, None].expand(ROWS, LENGTH)[MASK]
    batch = TrainBatch(
        step=0,
        temperature=1.0,
        prompt_ids=torch.ones(ROWS).numpy(),
        prompt_lengths=torch.ones(ROWS).numpy(),
        group_index=torch.zeros(ROWS).numpy(),
        completion_ids=torch.zeros(sum(LENGTHS)).numpy(),
        completion_lengths=torch.tensor(LENGTHS).numpy(),
        logprobs=torch.zeros(sum(LENGTHS)).numpy(),
        loss_mask=torch.ones(sum(LENGTHS), dtype=torch.bool).numpy(),
        advantages=given["advantages"].numpy(),
    )
    weights = token_weights(
        batch, aggregation=settings.aggregation, max_completion_length=MAX_LENGTH
    )
    logprobs = given["logprobs"].requires_grad_()
    entropy = given["entropy"].requires_grad_()
    loss, _ = policy_loss(
        logprobs[MASK],
        given["behaviour"][MASK],
        given["advantages"][rows],
        torch.from_numpy(weights),
        entropy[MASK],
        rows,
        reference=given["reference"][MASK],
        settings=settings,
    )
    gradients = torch.autograd.grad(loss, [logprobs, entropy], allow_unused=True)
    return loss.item(), *(g if g is not None else torch.zeros(ROWS, LENGTH) for g in gradients)


def theirs(
    *,
    loss_type: str,
    level: str = "token",
    epsilon: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    entropy_coef: float = 0.0,
    beta: float = 0.0,
    correction: Tensor | None = None,
) -> tuple[float, Tensor, Tensor]:
    """What TRL's trainer makes of them. With a `correction` its old policy is the current one."""
    given = tensors()
    logprobs = given["logprobs"].requires_grad_()
    entropy = given["entropy"].requires_grad_()
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x, sync_gradients=False
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropy, None),
        accelerator=accelerator,
        args=SimpleNamespace(delta=delta, steps_per_generation=1, use_bias_correction_kl=False),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        loss_type=loss_type,
        epsilon_low=epsilon,
        epsilon_high=epsilon_high,
        use_vllm=correction is not None,
        vllm_importance_sampling_correction=correction is not None,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_LENGTH,
        _entropy_bonus_enabled=entropy_coef > 0.0,
        use_adaptive_entropy=False,
        entropy_coef=entropy_coef,
        _metrics={"train": defaultdict(list)},  # that nobody reads
    )
    inputs = {
        "prompt_ids": torch.zeros(ROWS, 1, dtype=torch.long),
        "prompt_mask": torch.ones(ROWS, 1, dtype=torch.long),
        "completion_ids": torch.zeros(ROWS, LENGTH, dtype=torch.long),
        "completion_mask": MASK.long(),
        "advantages": given["advantages"],
        "num_items_in_batch": MASK.sum(),
        "ref_per_token_logps": given["reference"],
    }
    if correction is None:
        inputs["old_per_token_logps"] = given["behaviour"]
    else:
        inputs["importance_sampling_ratio"] = correction
    loss = grpo_trainer.GRPOTrainer._compute_loss(trainer, None, inputs)
    gradients = torch.autograd.grad(loss, [logprobs, entropy], allow_unused=True)
    return loss.item(), *(g if g is not None else torch.zeros(ROWS, LENGTH) for g in gradients)


def assert_equal(a: tuple[float, Tensor, Tensor], b: tuple[float, Tensor, Tensor]) -> None:
    assert a[0] == pytest.approx(b[0], rel=1e-12)
    assert a[1].abs().max() > 1e-3
    for mine, other in zip(a[1:], b[1:], strict=True):
        torch.testing.assert_close(mine.double(), other.double(), rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo"])
def test_the_clipped_losses_are_those_of_trl(kind: str) -> None:
    high = 0.28 if kind == "dapo" else 0.2
    assert_equal(ours(loss_type=kind), theirs(loss_type=kind, epsilon_high=high))


def test_ppo_is_what_trl_calls_bnpo() -> None:
    assert_equal(
        ours(loss_type="ppo", epsilon=0.1, epsilon_high=0.3),
        theirs(loss_type="bnpo", epsilon=0.1, epsilon_high=0.3),
    )


def test_delta_is_that_of_trl() -> None:
    assert_equal(ours(loss_type="grpo", delta=1.25), theirs(loss_type="grpo", delta=1.25))


def test_cispo_is_that_of_trl() -> None:
    # there the bound itself is the key, here 1 + epsilon_high
    assert_equal(
        ours(loss_type="cispo", epsilon_high=0.2), theirs(loss_type="cispo", epsilon_high=1.2)
    )


def test_gspo_is_grpo_of_trl_at_the_level_of_sequences() -> None:
    for epsilon, high in ((3e-4, 4e-4), (0.1, 0.15)):
        assert_equal(
            ours(loss_type="gspo", epsilon=epsilon, epsilon_high=high),
            theirs(loss_type="grpo", level="sequence", epsilon=epsilon, epsilon_high=high),
        )


def test_the_entropy_bonus_is_that_of_trl_where_all_tokens_weigh_the_same() -> None:
    assert_equal(
        ours(loss_type="dapo", entropy_coef=0.1),
        theirs(loss_type="dapo", epsilon_high=0.28, entropy_coef=0.1),
    )


def test_the_kl_term_is_that_of_trl() -> None:
    assert_equal(ours(loss_type="grpo", beta=0.3), theirs(loss_type="grpo", beta=0.3))
    assert_equal(ours(loss_type="dr_grpo", beta=0.04), theirs(loss_type="dr_grpo", beta=0.04))


def test_truncation_is_the_token_truncate_of_trl() -> None:
    given = tensors()
    correction = (given["logprobs"] - given["behaviour"]).exp().clamp(max=1.3)
    for kind in ("grpo", "dapo"):
        assert_equal(
            ours(loss_type=kind, mismatch_correction="truncate", mismatch_max=1.3),
            theirs(loss_type=kind, correction=correction),
        )


def test_the_band_mask_is_the_token_mask_of_trl() -> None:
    given = tensors()
    ratio = (given["logprobs"] - given["behaviour"]).exp()
    outside = (ratio < 0.8) | (ratio > 1.2)
    assert outside[MASK].any() and not outside[MASK].all()
    # within the band neither clip bites, and the ratio of the loss is the weight
    assert_equal(
        ours(
            loss_type="dapo",
            epsilon=0.21,
            mismatch_correction="mask",
            mismatch_min=0.8,
            mismatch_max=1.2,
        ),
        theirs(loss_type="dapo", correction=ratio.masked_fill(outside, 0.0)),
    )
