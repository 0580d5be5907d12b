"""The configuration's keys as a flat list: dotted name, type in words, default, description.

One walk over the pydantic models serves three readers: error messages (what was wanted), the
did-you-mean search (which names exist) and docs/config.md. An item of a list is written `N`, an
entry of a free mapping `NAME`: `rewards.N.weight`, `launch.env.NAME`.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from llamarl_hpc.config.schema import Config

ITEM = "N"
ENTRY = "NAME"


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of the config, or a block of keys."""

    name: str  # dotted
    annotation: Any
    wanted: str  # the type in words: "an integer of at least 1"
    default: Any  # None also where `required`
    required: bool
    description: str
    is_block: bool  # has keys of its own
    variant: str = ""  # which kind of list item it belongs to ("python"); empty: all

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def parent(self) -> str:
        return self.name.rpartition(".")[0]


@cache
def all_keys() -> tuple[Key, ...]:
    """Every key, in the order of the schema; a block comes before its keys."""
    return tuple(_walk(Config, ""))


@cache
def _by_name() -> dict[str, Key]:
    return {key.name: key for key in reversed(all_keys())}


def find(path: Sequence[str | int]) -> Key | None:
    """The key at a concrete place such as ("rewards", 0, "weight"); None if there is none."""
    name = ""
    for part in path:
        choices = [ITEM] if isinstance(part, int) else [part, ENTRY]
        steps = (f"{name}.{choice}" if name else choice for choice in choices)
        name = next((step for step in steps if step in _by_name()), "")
        if not name:
            return None
    return _by_name().get(name)


def keys_of(block: str) -> list[str]:
    """Names of the keys directly in `block` ("" is the top), without the block's name."""
    return list(dict.fromkeys(k.leaf for k in all_keys() if k.parent == block))


def dotted(path: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in path)


# ------------------------------------------------------------------------------ the walk


def _walk(model: type[BaseModel], prefix: str, variant: str = "") -> Iterator[Key]:
    for name, field in model.model_fields.items():
        annotation: Any = field.annotation
        if field.metadata:
            annotation = Annotated[(annotation, *field.metadata)]
        blocks = list(_blocks(annotation))
        yield Key(
            name=f"{prefix}{name}",
            annotation=annotation,
            wanted=describe(annotation),
            default=_default(field),
            required=field.is_required(),
            description=field.description or (_summary(blocks[0]) if blocks else ""),
            is_block=bool(blocks),
            variant=variant,
        )
        yield from _below(annotation, f"{prefix}{name}")


def _below(annotation: Any, name: str) -> Iterator[Key]:
    """Keys inside a block, the items of a list, the entries of a mapping."""
    origin, arguments = _bare(annotation)
    if origin is list:
        item = arguments[0]
        blocks = list(_blocks(item))
        if not blocks:
            yield _element(f"{name}.{ITEM}", item, is_block=False)
            return
        yield _element(f"{name}.{ITEM}", item, is_block=True)
        for block in blocks:
            yield from _walk(block, f"{name}.{ITEM}.", _variant(block) if len(blocks) > 1 else "")
    elif origin is dict:
        yield _element(f"{name}.{ENTRY}", arguments[1], is_block=False)
    elif origin is Union:
        for argument in arguments:
            yield from _below(argument, name)
    else:
        for block in _blocks(annotation):
            yield from _walk(block, f"{name}.")


def _element(name: str, annotation: Any, *, is_block: bool) -> Key:
    return Key(
        name=name,
        annotation=annotation,
        wanted=describe(annotation),
        default=None,
        required=False,
        description="",
        is_block=is_block,
    )


def _default(field: FieldInfo) -> Any:
    return None if field.is_required() else field.get_default(call_default_factory=True)


def _summary(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip()


def _variant(model: type[BaseModel]) -> str:
    kind = model.model_fields.get("kind")
    return str(kind.default) if kind is not None else model.__name__


# ------------------------------------------------------------------------------ types


def _bare(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Origin and arguments without `Annotated`; both spellings of a union are `Union`."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    origin = get_origin(annotation)
    return (Union if origin is types.UnionType else origin or annotation), get_args(annotation)


def _blocks(annotation: Any) -> Iterator[type[BaseModel]]:
    origin, arguments = _bare(annotation)
    if isinstance(origin, type) and issubclass(origin, BaseModel):
        yield origin
    elif origin is Union:
        for argument in arguments:
            yield from _blocks(argument)


def accepts(annotation: Any, kind: type) -> bool:
    """Whether a value of type `kind` (str, list, ...) can be right here."""
    origin, arguments = _bare(annotation)
    if origin is Union:
        return any(accepts(argument, kind) for argument in arguments)
    if origin is Literal:
        return any(type(argument) is kind for argument in arguments)
    return origin is kind or origin is Any


_WORDS: dict[Any, str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    types.NoneType: "null",
    Any: "any value",
}


def describe(annotation: Any) -> str:
    """A type in words: `an integer of at least 1`, `fp32 or bf16`, `a list of strings`."""
    bounds = _bounds(annotation)
    origin, arguments = _bare(annotation)
    if origin is Union:
        return _join([describe(argument) for argument in arguments])
    if origin is Literal:
        return _join([str(argument) for argument in arguments])
    if origin is list:
        return f"a list of {_plural(arguments[0])}{bounds}"
    if origin is dict:
        return f"a mapping to {_plural(arguments[1])}"
    if isinstance(origin, type) and issubclass(origin, BaseModel):
        return "a block of keys"
    return _WORDS.get(origin, str(origin)) + bounds


def _plural(annotation: Any) -> str:
    words = describe(annotation)
    if words.startswith("a block of keys"):
        return "blocks"
    return words.removeprefix("a ").removeprefix("an ") + ("" if words == "any value" else "s")


def _join(words: Sequence[str]) -> str:
    unique = list(dict.fromkeys(words))
    if len(unique) == 1:
        return unique[0]
    return ", ".join(unique[:-1]) + " or " + unique[-1]


def _bounds(annotation: Any) -> str:
    """The limits in the metadata of an annotation, as words with a leading blank."""
    found: list[str] = []
    while get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        found += [text for item in metadata for text in _limits(item)]
        annotation = inner
    return " " + " and ".join(found) if found else ""


def _limits(item: Any) -> Iterator[str]:
    if isinstance(item, FieldInfo):
        for inner in item.metadata:
            yield from _limits(inner)
    elif isinstance(item, annotated_types.Gt):
        yield f"above {item.gt}"
    elif isinstance(item, annotated_types.Ge):
        yield f"of at least {item.ge}"
    elif isinstance(item, annotated_types.Le):
        yield f"at most {item.le}"
    elif isinstance(item, annotated_types.Lt):
        yield f"below {item.lt}"
    elif isinstance(item, annotated_types.MinLen):
        yield f"(at least {item.min_length})"
