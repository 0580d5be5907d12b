"""GPUs in Slurm's notations: GRES (`gpu:a100:4`, of one node) and TRES (`gres/gpu=8`, of a job)."""

from __future__ import annotations

import re

from llamarl_hpc.errors import ConfigError

_PLACE = re.compile(r"\([^)]*\)")  # sockets (S:0-1), indices (IDX:0,3), (null)
_NOTHING = ("", "N/A", "none")


def count_gpus(text: str, *, nodes: int) -> int:
    """GPUs of a job on `nodes` nodes: a GRES counts for each node, a TRES is the total already.

    `gres/gpu=4,gres/gpu:a100=4` are four GPUs: the typed entry repeats the other. Raises
    ConfigError.
    """
    plain = _PLACE.sub("", text).strip()
    if plain in _NOTHING:
        return 0
    entries = [entry.strip() for entry in plain.split(",")]
    if any("=" in entry for entry in entries):
        return _in_tres(entries, text)
    return nodes * sum(_in_gres(entry, text) for entry in entries)


def _in_gres(entry: str, text: str) -> int:
    name, *rest = entry.removeprefix("gres/").removeprefix("gres:").split(":")
    if name != "gpu":
        return 0
    if len(rest) > 2:
        raise ConfigError(
            f"'{text}' names a GPU in {len(rest) + 1} parts; wanted gpu:TYPE:COUNT, with a type "
            f"that has no colon, such as gpu:{rest[-2]}:{rest[-1]}"
        )
    if not rest or not rest[-1].isdigit():
        if len(rest) > 1:
            raise ConfigError(f"'{text}' has no number of GPUs; wanted gpu:TYPE:COUNT")
        return 1  # `gpu` and `gpu:a100` mean one
    return int(rest[-1])


def _in_tres(entries: list[str], text: str) -> int:
    untyped: int | None = None
    typed = 0
    for entry in entries:
        name, _, value = entry.partition("=")
        if not (name == "gres/gpu" or name.startswith("gres/gpu:")):
            continue
        if not value.isdigit():
            raise ConfigError(f"'{text}' has no number of GPUs; wanted gres/gpu=COUNT")
        if name == "gres/gpu":
            untyped = int(value)
        else:
            typed += int(value)
    return typed if untyped is None else untyped
