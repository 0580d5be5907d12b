"""A reward function of the user's: found by name, checked once, called in TRL's form.

`module:function` is imported with the current folder on the path; `path/to/file.py:function` is
read from that file. A function may name only the arguments it wants; `**kwargs` gets the rest.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from llamarl_hpc.errors import ConfigError


class PythonFunction:
    """Calls `function` with the arguments it accepts. Raises ConfigError when it is no reward."""

    def __init__(self, function: str) -> None:
        self.name = function
        self.function = _find(function)
        self.accepted = _accepted(function, self.function)

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[Any]
    ) -> list[float | None]:
        arguments: dict[str, Any] = {"prompts": prompts, "completions": completions, **columns}
        if self.accepted is not None:
            arguments = {name: arguments[name] for name in self.accepted if name in arguments}
        values: list[float | None] = self.function(**arguments)
        return values


def _find(function: str) -> Callable[..., Any]:
    place, colon, name = function.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise ConfigError(
            f"rewards function '{function}': wanted module:function or path/to/file.py:function"
        )
    module = _from_file(Path(place)) if place.endswith(".py") else _from_module(place)
    found = getattr(module, name, None)
    if found is None:
        names = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
        near = difflib.get_close_matches(name, names, n=1) or names
        raise ConfigError(
            f"rewards function '{function}': {place} has no '{name}'; it has "
            f"{', '.join(near) or 'no functions'}"
        )
    if not callable(found):
        raise ConfigError(
            f"rewards function '{function}' is {type(found).__name__}, not a function"
        )
    return found  # type: ignore[no-any-return]


def _from_module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"rewards module '{name}' was not found in the current folder or among the "
                "installed packages; check its name or give path/to/file.py:function"
            ) from error
        raise _broken(name, error) from error
    except Exception as error:
        raise _broken(name, error) from error


def _from_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"the rewards file {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"llamarl_rewards_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class's module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _broken(str(path), error) from error
    return module


def _broken(what: str, error: Exception) -> ConfigError:
    return ConfigError(f"importing rewards from {what} failed: {type(error).__name__}: {error}")


def _accepted(name: str, function: Callable[..., Any]) -> list[str] | None:
    """Names of the arguments it takes; None when it takes any (**kwargs)."""
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"rewards function '{name}' is async; wanted a plain function")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins do not say
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if "completions" not in names:
        raise ConfigError(
            f"rewards function '{name}' takes ({', '.join(names)}); wanted "
            "f(prompts, completions, **columns)"
        )
    return names
