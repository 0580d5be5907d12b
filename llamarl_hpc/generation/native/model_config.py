"""The config of a model folder, read without transformers where it holds nothing unusual.

Importing transformers costs every rank of every generator seconds of processor time and about a
thousand files, which a parallel file system serves slowly. What is left out of a file, or of a kind
that is not known here, is looked up there all the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llamarl_hpc.errors import ConfigError

_NEEDED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "hidden_act",
)
# By model type: what a file must say besides, and what it may leave out.
_KNOWN: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "llama": ((), {}),
    "mistral": (("sliding_window",), {}),
    "qwen2": ((), {"use_sliding_window": False}),
    "qwen3": (("head_dim",), {"use_sliding_window": False}),
}
_OPTIONAL = {
    "attention_bias": False,
    "head_dim": None,
    "mlp_bias": False,
    "sliding_window": None,
    "tie_word_embeddings": False,
}


def load_config(folder: Path) -> Any:
    """An object with the attributes of the folder's transformers config, as far as the native
    engine asks for them. ConfigError when there is none that can be read."""
    return read_plainly(folder) or _by_transformers(folder)


def read_plainly(folder: Path) -> Any | None:
    """None where transformers must be asked."""
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        needed, optional = _KNOWN[values["model_type"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        return None
    if any(values.get(name) is None for name in _NEEDED) or any(n not in values for n in needed):
        return None
    if values.get("use_sliding_window") and "sliding_window" not in values:
        return None
    theta = rope.get("rope_theta") or values.get("rope_theta")
    if theta is None:
        return None
    known = {"rope_parameters": {"rope_type": "default", "rope_theta": float(theta)}}
    return SimpleNamespace(**_OPTIONAL | optional | values | known)


def _by_transformers(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot read the model config in {folder}: {error}") from error
