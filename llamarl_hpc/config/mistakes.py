"""What the schema refused, in words: where, which key, what was wanted, what was found.

One sentence per mistake. An unknown key is answered with the nearest one that exists.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from llamarl_hpc.config import fields
from llamarl_hpc.config.other_names import hint_for

Place = tuple[str | int, ...]  # ("rewards", 0, "weight")
Where = Callable[[Place], str]  # -> "x.yaml line 12", "--set a.b=c"


def sentences(error: ValidationError, values: dict[str, Any], where_is: Where) -> list[str]:
    """One sentence per mistake in `values`, without repeats."""
    return list(dict.fromkeys(_sentence(dict(item), values, where_is) for item in error.errors()))


def _sentence(error: dict[str, Any], values: dict[str, Any], where_is: Where) -> str:
    """One pydantic error in words: where, which key, what was wanted, what was found."""
    place = _place(error["loc"], values, missing=error["type"] == "missing")
    where = where_is(place)
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown key '{fields.dotted(place)}'; {_nearest(place)}"
    if error["type"].startswith("union_tag"):
        place = (*place, "kind")
        kinds = " or ".join(v for v in _variants(place))
        found = error["input"].get("kind") if isinstance(error["input"], Mapping) else None
        return f"{where}: {fields.dotted(place)}: wanted {kinds}, found {_shown(found)}"
    key = fields.find(place)
    wanted = key.wanted if key is not None else str(error["msg"])
    if error["type"] == "missing":
        return f"{where}: {fields.dotted(place)} is missing; wanted {wanted}"
    found = error["input"]
    number = isinstance(found, int | float) and not isinstance(found, bool)
    quotes = number and key is not None and fields.accepts(key.annotation, str)
    hint = "; put it in quotes" if quotes else ""
    return f"{where}: {fields.dotted(place)}: wanted {wanted}, found {_shown(found)}{hint}"


def _place(loc: Sequence[str | int], values: Any, *, missing: bool) -> Place:
    """Pydantic's location without the names of union members that it inserts."""
    place: list[str | int] = []
    node = values
    for index, part in enumerate(loc):
        if _has(node, part):
            node = node[part]
        elif not (missing and index == len(loc) - 1):
            continue
        place.append(part)
    return tuple(place)


def _has(node: Any, part: str | int) -> bool:
    if isinstance(node, list):
        return isinstance(part, int) and part < len(node)
    return isinstance(node, Mapping) and part in node


def _variants(place: Place) -> list[str]:
    name = fields.find(place)
    return [k.variant for k in fields.all_keys() if name is not None and k.name == name.name]


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "a block of keys"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _nearest(place: Place) -> str:
    """`did you mean '...'?`, or the keys there are, for a name that does not exist."""
    leaf = str(place[-1])
    parts = leaf.split(".")
    if len(parts) > 1 and fields.find(parts) is not None:
        return f"write it as a block: {': {'.join(parts)}: ...{'}' * (len(parts) - 1)}"
    if hint := hint_for(place):
        return hint
    block = fields.find(place[:-1]) if len(place) > 1 else None
    siblings = fields.keys_of(block.name if block else "")
    beside = difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.6)
    if beside:
        return f"did you mean '{fields.dotted((*place[:-1], beside[0]))}'?"
    elsewhere = {key.leaf: key.name for key in reversed(fields.all_keys())}
    near = difflib.get_close_matches(leaf, elsewhere, n=1, cutoff=0.85)
    if near:
        return f"did you mean '{elsewhere[near[0]]}'?"
    part_of = [n for n in siblings if n in leaf.split("_") or leaf.startswith(n)]
    if part_of:  # slurm_account, timeout_min: another tool's longer name
        return f"did you mean '{fields.dotted((*place[:-1], part_of[0]))}'?"
    what = f"'{fields.dotted(place[:-1])}'" if len(place) > 1 else "the config"
    return f"{what} has {', '.join(siblings)}"
