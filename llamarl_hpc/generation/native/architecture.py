"""What the native engine must know of a model's config, and which models it can run.

Llama, Mistral, Qwen2 and Qwen3 differ only in biases and in the norms of queries and keys. The
names of weights are those of Hugging Face.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.generation.native.rotary import rotary_settings

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")

# Rotary tables that depend on how long the sequence has become; a table made once cannot serve.
_GROWING_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes and switches of a Llama-family decoder."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    tied: bool  # lm_head is the embedding
    qkv_bias: bool
    output_bias: bool  # of the attention's output matrix
    mlp_bias: bool
    qk_norm: bool  # norm of every head's query and key (Qwen3)


def architecture_of(config: Any, *, max_context: int) -> Architecture:
    """Check that the native engine computes this model exactly, up to `max_context` tokens."""
    kind = config.model_type
    if kind not in SUPPORTED:
        raise ConfigError(
            f"the native engine runs models of type {', '.join(SUPPORTED)}, but model.path holds "
            f"one of type {kind}; choose a supported model"
        )
    if config.hidden_act != "silu":
        raise ConfigError(
            f"the native engine computes the activation silu, but the model uses "
            f"{config.hidden_act}; choose a supported model"
        )
    _check_positions(config, max_context)
    heads = config.num_attention_heads
    attention_bias = bool(getattr(config, "attention_bias", False))
    return Architecture(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        tied=bool(config.tie_word_embeddings),
        qkv_bias=kind == "qwen2" or attention_bias,
        output_bias=kind != "qwen2" and attention_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=kind == "qwen3",
    )


def _check_positions(config: Any, max_context: int) -> None:
    longest = config.max_position_embeddings
    if max_context > longest:
        raise ConfigError(
            f"a context of {max_context} tokens was asked for, but the model ends at {longest}; "
            "lower model.max_context"
        )
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True) and max_context > window:
        raise ConfigError(
            f"the model attends within a sliding window of {window} tokens, which the native "
            f"engine does not compute; set model.max_context to at most {window}"
        )
    rope = rotary_settings(config).get("rope_type", "default")
    if rope in _GROWING_ROPE:
        raise ConfigError(
            f"the model uses rotary positions of type {rope}, which the native "
            "engine does not compute; choose a supported model"
        )
