"""`--json FILE` of the commands that print figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llamarl_hpc.errors import ConfigError


def write_figures(path: Path, figures: dict[str, Any]) -> None:
    """Replace `path` by the figures; its folder is made. Raises ConfigError when it cannot be."""
    from llamarl_hpc.storage.atomic import write_json

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, figures)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another --json") from (
            error
        )
