"""Changes of a config as Python values, turned into what `--set` takes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llamarl_hpc.errors import ConfigError

Changes = Mapping[str, Any] | Sequence[str] | None


def as_overrides(changes: Changes) -> list[str]:
    """`{"trainer.max_steps": 10}`, `{"trainer": {"max_steps": 10}}` and `["trainer.max_steps=10"]`
    all give `["trainer.max_steps=10"]`. Blocks are merged, never replaced. Raises ConfigError."""
    if changes is None:
        return []
    if isinstance(changes, Mapping):
        return list(_flat("", changes))
    if isinstance(changes, str) or not all(isinstance(text, str) for text in changes):
        raise ConfigError(
            "changes are a mapping such as {'trainer.max_steps': 10} or a list such as "
            f"['trainer.max_steps=10'], found {changes!r}"
        )
    return list(changes)


def _flat(prefix: str, block: Mapping[str, Any]) -> Iterator[str]:
    for key, value in block.items():
        if not isinstance(key, str):
            raise ConfigError(
                f"a key of changes is text such as 'trainer.max_steps', found {key!r}"
            )
        if isinstance(value, Mapping) and value:
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}={_written(prefix + key, value)}"


def _written(key: str, value: Any) -> str:
    """JSON, which is YAML too; numpy's numbers and paths as what they stand for."""
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError):
        raise ConfigError(f"{key}: a value of a config cannot be {value!r}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        return value.item()
    raise TypeError
