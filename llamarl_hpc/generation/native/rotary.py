"""Tables of rotary positions (RoFormer, Su et al. 2021), equal bit for bit to the trainer's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rotary_tables(
    config: Any, max_context: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin [max_context, D] of a transformers config."""
    frequencies, factor = _frequencies(config)
    positions = torch.arange(max_context).float()
    angles = positions[:, None] * frequencies.float()
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return cos.to(device, dtype), sin.to(device, dtype)


def rotary_settings(config: Any) -> dict[str, Any]:
    """The config's `rope_type`, `rope_theta` and what belongs to the type; {} if it has none."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    return dict(rope or {})


def _frequencies(config: Any) -> tuple[Tensor, float]:
    """Radians per position [D / 2], and what cos and sin are multiplied by.

    Scaled ones come from transformers, as in the trainer. The plain ones are computed here: in
    transformers they are part of each model, and importing a model costs every generator rank
    seconds of processor time and a thousand files.
    """
    rope = rotary_settings(config)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        theta = rope.get("rope_theta") or config.rope_theta
        size = getattr(config, "head_dim", None)
        size = size or config.hidden_size // config.num_attention_heads
        return 1.0 / (theta ** (torch.arange(0, size, 2, dtype=torch.float) / size)), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config)
    return frequencies, float(factor)
