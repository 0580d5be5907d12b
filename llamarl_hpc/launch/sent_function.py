"""A function on its way into a job as a pickle: what a submission can warn of, or must refuse."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llamarl_hpc.errors import ConfigError

log = logging.getLogger(__name__)
_LARGE_MIB = 100


def write_function(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    write: Callable[[], None],
    can_be_sent: Callable[[Any], bool],
    path: Path,
) -> None:
    """Have `write` make the pickle `path`. What is large is told of, because every start reads it.
    Raises ConfigError, with the names of what cannot be sent."""
    try:
        write()
    except Exception as error:  # whatever an object's own pickling raises
        path.unlink(missing_ok=True)
        values = _values(function, args, kwargs)
        named = ", ".join(name for name, value in values.items() if not can_be_sent(value))
        raise ConfigError(
            f"{_name(function)} cannot be sent to a job because of {named or 'what it holds'} "
            f"({error}); open files, locks and the like inside the function"
        ) from error
    if (mib := path.stat().st_size >> 20) >= _LARGE_MIB:
        log.warning(
            "%s and what it holds take %d MiB, which every start reads from %s; leave large data "
            "in files of their own and pass their names",
            *(_name(function), mib, path.parent),
        )


def warn_of_a_start_from_zero(function: Callable[..., Any]) -> None:
    """Of a job that may be requeued: submitit continues what it can checkpoint only."""
    if not (hasattr(function, "checkpoint") or hasattr(function, "__submitit_checkpoint__")):
        log.warning(
            "%s has no method 'checkpoint', so after a requeue it begins from zero, and the time "
            "limit ends it",
            _name(function),
        )


def _values(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """By name: the arguments, and what the function takes from around it."""
    around: dict[str, Any] = dict(getattr(function, "__dict__", {}))
    if inspect.isfunction(function):
        found = inspect.getclosurevars(function)
        around |= {**found.globals, **found.nonlocals}
    numbered = {f"argument {n}": value for n, value in enumerate(args, start=1)}
    return {**numbered, **kwargs, **around}


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
