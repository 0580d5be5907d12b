"""Learning rates at the corners of the schedule, and clipping."""

from __future__ import annotations

import pytest
import torch

from llamarl_hpc.config.schema import TrainerConfig
from llamarl_hpc.training.optimizer import clip_gradients, learning_rate


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 0.0]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 0.0]),
    ],
)
def test_warmup_then_decay_to_zero_at_max_steps(kind: str, expected: list[float]) -> None:
    config = TrainerConfig(learning_rate=1.0, lr_scheduler_type=kind, warmup_steps=4, max_steps=12)  # type: ignore[arg-type]
    rates = [learning_rate(config, version) for version in (0, 1, 2, 3, 4, 8, 12)]
    assert rates == pytest.approx(expected, abs=1e-12)


def test_without_warmup_the_first_step_has_the_peak_rate() -> None:
    config = TrainerConfig(learning_rate=3e-4, lr_scheduler_type="cosine", max_steps=10)
    assert learning_rate(config, 0) == 3e-4
    assert learning_rate(config, 25) == pytest.approx(0.0, abs=1e-18)


@pytest.mark.parametrize(
    ("max_norm", "expected"),
    [(0.0, [3.0, 4.0, 12.0]), (26.0, [3.0, 4.0, 12.0]), (6.5, [1.5, 2, 6])],
)
def test_clipping_scales_all_groups_by_their_common_norm(
    max_norm: float, expected: list[float]
) -> None:
    first, second = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))
    first.grad, second.grad = torch.tensor([3.0, 4.0]), torch.tensor([12.0])
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=1.0)
    assert clip_gradients(optimizer, max_norm) == 13.0
    assert [*first.grad.tolist(), *second.grad.tolist()] == pytest.approx(expected, rel=1e-6)


def test_a_long_gradient_has_the_norm_of_its_float64_copy() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1500, 1700))  # longer than two blocks
    gradient = torch.randn(1700, 1500, generator=torch.Generator().manual_seed(0)).t()
    parameter.grad = gradient.clone(memory_format=torch.preserve_format)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    expected = float(torch.linalg.vector_norm(gradient.double()))
    assert clip_gradients(optimizer, 1e9) == pytest.approx(expected, rel=1e-7)
    assert torch.equal(parameter.grad, gradient)  # within the bound: not a bit changes
