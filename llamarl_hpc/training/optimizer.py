"""AdamW, its learning rate as a pure function of the policy version, and gradient clipping."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from llamarl_hpc.config.schema import TrainerConfig
from llamarl_hpc.training.policy import PolicyModel

_NORM_BLOCK = 1 << 20  # elements that are float64 at one time: 8 MiB stay in a cache


def build_optimizer(policy: PolicyModel, config: TrainerConfig) -> torch.optim.AdamW:
    """torch's AdamW, fused (one pass over memory). Norms and biases do not decay."""
    parameters = list(policy.trained_names().values())
    groups: list[dict[str, Any]] = [{"params": parameters, "weight_decay": config.weight_decay}]
    if config.weight_decay > 0.0:
        matrices = [p for p in parameters if p.ndim >= 2]
        vectors = [p for p in parameters if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )


def learning_rate(config: TrainerConfig, policy_version: int) -> float:
    """Rate of the step that makes version `policy_version + 1`.

    Rises linearly over `warmup_steps` (the first step already moves), then stays, or falls to 0
    at `max_steps`.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if policy_version < warmup:
        return peak * (policy_version + 1) / warmup
    if config.lr_scheduler_type == "constant":
        return peak
    done = min(1.0, (policy_version - warmup) / max(1, config.max_steps - warmup))
    if config.lr_scheduler_type == "linear":
        return peak * (1.0 - done)
    return peak * 0.5 * (1.0 + math.cos(math.pi * done))


def clip_gradients(optimizer: torch.optim.Optimizer, max_norm: float) -> float:
    """Scale all gradients to a norm of at most `max_norm` (0: leave them); their norm before.

    The arithmetic is ZeRO's, so that it gives the same bits: norms of single tensors in float64,
    summed within a parameter group, float32 from there on.
    """
    group_norms, gradients = [], []
    for group in optimizer.param_groups:
        present = [p.grad for p in group["params"] if p.grad is not None]
        parts = torch.stack([_norm(g) for g in present])
        group_norms.append(parts.pow(2.0).sum().float().pow(0.5))
        gradients += present
    norm = torch.linalg.vector_norm(torch.stack(group_norms))
    excess = (norm + 1e-6) / max_norm if max_norm > 0.0 else norm.new_ones(())
    if not excess <= 1.0:  # also where it is nan
        for gradient in gradients:
            gradient.mul_(1.0 / excess)
    return float(norm)


def _norm(gradient: Tensor) -> Tensor:
    """Its norm as a float64 scalar, without a float64 copy of all of it."""
    blocks = torch.split(gradient.reshape(-1), _NORM_BLOCK)
    norms = torch.stack([torch.linalg.vector_norm(block.double()) for block in blocks])
    return norms[0] if len(blocks) == 1 else torch.linalg.vector_norm(norms)
