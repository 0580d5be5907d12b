"""Rules between the config and the model that it names, once the model's own config is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamarl_hpc.config.schema import Config
from llamarl_hpc.errors import ConfigError


def check_model(config: Config, context_length: int) -> None:
    """Raise ConfigError when prompt and completion may not fit the model's context.

    `context_length` is the model's own limit in tokens; `model.max_context` can only lower it.
    """
    limit, rollout = config.model.max_context or context_length, config.rollout
    if limit > context_length:
        raise ConfigError(
            f"model.max_context is {limit} but the model was made for {context_length} tokens; "
            "lower it or remove it"
        )
    longest = rollout.max_prompt_length + rollout.max_completion_length
    if longest > limit:
        raise ConfigError(
            f"rollout.max_prompt_length {rollout.max_prompt_length} plus "
            f"rollout.max_completion_length {rollout.max_completion_length} is {longest} tokens "
            f"but the context is {limit}; lower one of them"
        )


def check_replica(config: Config, model: Mapping[str, Any]) -> None:
    """Raise ConfigError when a replica has more ranks than the model can be cut into. `model`: its
    config.json."""
    ranks, heads = config.resources.generator.num_ranks, model.get("num_attention_heads", 1)
    parts = {"heads of keys and values": model.get("num_key_value_heads") or heads}
    parts |= {"rows of the MLP": model.get("intermediate_size", ranks)}
    what, most = min(parts.items(), key=lambda item: item[1])
    if ranks > most:
        raise ConfigError(
            f"resources.generator asks for {ranks} ranks (nodes x ntasks_per_node) but the model "
            f"has {most} {what} to share among them; lower them to {most} or less and raise "
            "generator.replicas instead"
        )
