"""From YAML and `--set key=value` to a checked `Config`, and back to the copy in the run folder.

    file -> YAML (line numbers kept) -> overrides -> site profile (site.py) beneath
         -> interpolation (${oc.env:SCRATCH}) -> schema -> paths made absolute
         -> cross-field rules (checks.py)

Everything a user can get wrong ends in a `ConfigError` that says where: file and line, or the
`--set` it came from. What a value must be is the schema's business; nothing here knows a key.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from llamarl_hpc.config import fields
from llamarl_hpc.config.checks import check
from llamarl_hpc.config.mistakes import sentences
from llamarl_hpc.config.schema import Config, LaunchConfig
from llamarl_hpc.config.site import load_site
from llamarl_hpc.errors import ConfigError

_Place = tuple[str | int, ...]


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """The configuration in `path` with `--set` overrides, complete, valid and consistent.

    An override is `a.b=value`; the value is read as YAML (`null`, `[1, 2]`, `true`), except that
    a key which holds text takes it as it stands. Without a value, `a.b=`, it is null where that is
    allowed, and an empty text in `options` and `env`. `rewards.0.weight=2` reaches into a list; one
    index past its end adds an item. File names in the config are relative to the current folder.

    Raises ConfigError.
    """
    source = _Source.read(Path(path))
    values = source.values
    for text in overrides:
        place, value = _parse_override(text)
        _set(values, place, value, text)
        source.set_by[place] = text
    return _validate(_resolve(_with_site(values, source), source), source)


def resolved_text(config: Config) -> str:
    """Every key with its value, as YAML."""
    node = OmegaConf.create(_escaped(config.model_dump(mode="json")))
    return "# Every key of this run, resolved.\n" + OmegaConf.to_yaml(node)


def save_resolved(config: Config, path: Path | str) -> None:
    """Write every key with its value, so that `load_config(path)` gives an equal Config."""
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    beside.write_text(resolved_text(config))
    os.replace(beside, target)


# ------------------------------------------------------------------------------ reading


class _Source:
    """Values as written, and where each came from (for messages)."""

    def __init__(self, path: Path, values: dict[str, Any], lines: dict[_Place, int]) -> None:
        self.path, self.values, self.lines = path, values, lines
        self.set_by: dict[_Place, str] = {}

    @classmethod
    def read(cls, path: Path) -> _Source:
        text = _read_text(path)
        try:
            tree = yaml.compose(text, Loader=yaml.SafeLoader)
            loaded = OmegaConf.create(text) if tree is not None else None
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 0
            problem = error.problem or "it cannot be read"
            raise ConfigError(f"{path} line {line}: not valid YAML ({problem})") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: not valid YAML ({error})") from error
        except OmegaConfBaseException as error:
            raise ConfigError(f"{path}: {_first_line(error)}") from error
        if tree is None or loaded is None:
            raise ConfigError(f"{path} is empty; wanted blocks of keys such as 'data:'")
        if not isinstance(tree, yaml.MappingNode):
            raise ConfigError(f"{path}: wanted blocks of keys such as 'data:', found {_kind(tree)}")
        values = OmegaConf.to_container(loaded, resolve=False)
        assert isinstance(values, dict)
        return cls(path, values, dict(_lines(tree, ())))  # type: ignore[arg-type]

    def where(self, place: _Place) -> str:
        """`file line 12` or `--set ...` for the value at `place` or the nearest one above it."""
        for end in range(len(place), 0, -1):
            if place[:end] in self.set_by:
                return f"--set {self.set_by[place[:end]]}"
            if place[:end] in self.lines:
                return f"{self.path} line {self.lines[place[:end]]}"
        return str(self.path)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, _siblings(path), n=1)
        hint = f"; did you mean '{path.with_name(near[0])}'?" if near else ""
        raise ConfigError(f"the configuration file {path} does not exist{hint}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; wanted a YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file in UTF-8 ({error.reason})") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _siblings(path: Path) -> list[str]:
    try:
        return [p.name for p in path.parent.iterdir() if p.suffix in (".yaml", ".yml")]
    except OSError:
        return []


def _lines(node: yaml.Node, place: _Place) -> list[tuple[_Place, int]]:
    """(place, line) of every key and list item below `node`; lines count from 1."""
    found: list[tuple[_Place, int]] = []
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*place, key.value)
            found += [(inner, key.start_mark.line + 1), *_lines(value, inner)]
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            inner = (*place, index)
            found += [(inner, value.start_mark.line + 1), *_lines(value, inner)]
    return found


def _kind(node: yaml.Node) -> str:
    return "a list" if isinstance(node, yaml.SequenceNode) else "a single value"


# ------------------------------------------------------------------------------ overrides


def _parse_override(text: str) -> tuple[_Place, Any]:
    name, equals, value = text.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set wants KEY=VALUE such as trainer.max_steps=10, found '{text}'")
    place = tuple(int(part) if part.isdigit() else part for part in parts)
    return place, _typed(place, value) if value.strip() else _nothing(place, text)


def _nothing(place: _Place, text: str) -> str | None:
    """What `a.b=` means. Raises ConfigError where it means nothing."""
    key = fields.find(place)
    if key is None or fields.accepts(key.annotation, type(None)):
        return None
    if key.leaf == fields.ENTRY and fields.accepts(key.annotation, str):
        return ""
    raise ConfigError(f"--set {text}: no value after the '='; wanted {key.wanted}")


def _typed(place: _Place, text: str) -> Any:
    """`text` as YAML, or as it stands where the key holds text: name=123, time=04:00:00."""
    key = fields.find(place)
    try:
        loaded = OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=False)
        value = loaded["value"]  # type: ignore[call-overload, index]
    except (yaml.YAMLError, OmegaConfBaseException):
        value = text
    if key is None or value is None or isinstance(value, str):
        return value
    wrong_type = not fields.accepts(key.annotation, type(value))
    return text if wrong_type and fields.accepts(key.annotation, str) else value


def _set(values: dict[str, Any], place: _Place, value: Any, text: str) -> None:
    """Put `value` at `place`, making blocks on the way; a list not yet written is the default's."""
    node: Any = values
    for depth, part in enumerate(place):
        here = place[:depth]
        _expect(node, part, here, text)
        if depth == len(place) - 1:
            break
        missing = (isinstance(node, dict) and node.get(part) is None) or (
            isinstance(node, list) and part == len(node)
        )
        if missing:
            _put(node, part, _default_list(place[: depth + 1]))
        node = node[part]
    _put(node, place[-1], value)


def _expect(node: Any, part: str | int, here: _Place, text: str) -> None:
    name = fields.dotted(here) or "the config"
    if isinstance(node, list):
        if not isinstance(part, int):
            raise ConfigError(f"--set {text}: {name} is a list; wanted an index, found '{part}'")
        if part > len(node):
            raise ConfigError(
                f"--set {text}: {name} has {len(node)} item(s); index {part} is too large"
            )
    elif not isinstance(node, dict):
        raise ConfigError(f"--set {text}: {name} is a single value and has no key '{part}'")


def _put(node: Any, part: str | int, value: Any) -> None:
    if isinstance(node, list) and part == len(node):
        node.append(value)
    else:
        node[part] = value


def _default_list(place: _Place) -> Any:
    key = fields.find(place)
    if key is None or not isinstance(key.default, list):
        return {}
    return [item.model_dump() if hasattr(item, "model_dump") else item for item in key.default]


# ------------------------------------------------------------------------------ site profile


def _with_site(values: dict[str, Any], source: _Source) -> dict[str, Any]:
    """Values of the profile that `launch.site` names, where the config has none."""
    launch = values.get("launch")
    if not isinstance(launch, dict) or launch.get("site") is None:
        return values
    place = ("launch", "site")
    site = _resolve({"site": launch["site"]}, source)["site"]
    if not isinstance(site, str):
        return values  # for the schema to refuse
    if set(LaunchConfig.model_fields) <= set(launch):  # the copy in a run folder: all is decided
        if place in source.set_by:
            raise ConfigError(
                f"--set {source.set_by[place]}: a run keeps the settings of its site; change the "
                "keys themselves with --set, or start a new run"
            )
        return values
    return load_site(site).beneath(values)


# ------------------------------------------------------------------------------ validation


def _resolve(values: dict[str, Any], source: _Source) -> dict[str, Any]:
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    except OmegaConfBaseException as error:
        place = _split(str(getattr(error, "full_key", None) or ""))
        name = f"{fields.dotted(place)}: " if place else ""
        raise ConfigError(f"{source.where(place)}: {name}{_first_line(error)}") from error
    assert isinstance(resolved, dict)
    # `trainer:` with every key below it commented out is an empty block, not a null
    return {str(k): {} if v is None and _is_block(str(k)) else v for k, v in resolved.items()}


def _is_block(name: str) -> bool:
    key = fields.find((name,))
    return key is not None and key.is_block


def _validate(values: dict[str, Any], source: _Source) -> Config:
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(".\n".join(sentences(error, values, source.where))) from None
    config = _anchored(config)
    check(config)
    return config


# ------------------------------------------------------------------------------ small things


def _anchored(config: Config) -> Config:
    """The same config with absolute paths, so that a run can be resumed from any folder."""
    data = {
        name: os.path.abspath(os.path.expanduser(value))
        for name, value in (("path", config.data.path), ("eval_path", config.data.eval_path))
        if value is not None
    }
    model = {}
    if os.path.exists(folder := os.path.expanduser(config.model.path)):
        model["path"] = os.path.abspath(folder)
    rewards = [_anchored_reward(reward) for reward in config.rewards]
    site = config.launch.site
    launch = {}
    if site is not None and site.endswith((".yaml", ".yml")):
        launch["site"] = os.path.abspath(os.path.expanduser(site))
    return config.model_copy(
        update={
            "launch": config.launch.model_copy(update=launch),
            "data": config.data.model_copy(update=data),
            "model": config.model.model_copy(update=model),
            "rewards": rewards,
        }
    )


def _anchored_reward(reward: Any) -> Any:
    """A Python reward with its name filled in and an absolute file name."""
    if reward.kind != "python":
        return reward
    place, colon, function = reward.function.rpartition(":")
    if place.endswith(".py"):
        place = os.path.abspath(os.path.expanduser(place))
    update = {"function": f"{place}{colon}{function}", "name": reward.name or function}
    return reward.model_copy(update=update)


def _escaped(value: Any) -> Any:
    """Text that looks like an interpolation, marked so that it stays text."""
    if isinstance(value, dict):
        return {key: _escaped(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner) for inner in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)
    return value


def _split(key: str) -> _Place:
    """OmegaConf's `rewards[0].weight` as a place."""
    parts = re.findall(r"[^.\[\]]+", key)
    return tuple(int(part) if part.isdigit() else part for part in parts)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
