"""Slurm's compressed node lists: `r[1-2]n[01-02],login` is five names."""

from __future__ import annotations

from llamarl_hpc.errors import ConfigError


def expand_nodes(text: str) -> list[str]:
    """All names, in the order written, with their leading zeros.

    Any number of brackets in a name, text after a bracket, blanks around names. Raises ConfigError
    with the position (from 1) of what is wrong.
    """
    names = [name for part, start in _parts(text) for name in _expand(part, start, text)]
    if not names:
        raise ConfigError("wanted a Slurm node list such as node[01-04], found empty text")
    return names


def _parts(text: str) -> list[tuple[str, int]]:
    """(part, where it begins) between the commas outside of brackets."""
    parts: list[tuple[str, int]] = []
    start, depth = 0, 0
    for position, character in enumerate(text):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            raise _wrong(text, position, f"'{character}' does not belong here")
        if character == "," and depth == 0:
            parts.append((text[start:position], start))
            start = position + 1
    if depth:
        raise _wrong(text, len(text), "a bracket is not closed")
    if text.strip():
        parts.append((text[start:], start))
    return parts


def _expand(part: str, start: int, text: str) -> list[str]:
    name = part.strip()
    if not name:
        raise _wrong(text, start, "a name is missing")
    offset = start + part.index(name)
    names = [""]
    while name:
        before, bracket, rest = name.partition("[")
        names = [n + before for n in names]
        if not bracket:
            break
        inside, _, name = rest.partition("]")
        offset += len(before) + 1
        numbers = _numbers(inside, offset, text)
        names = [n + number for n in names for number in numbers]
        offset += len(inside) + 1
    return names


def _numbers(inside: str, offset: int, text: str) -> list[str]:
    """`01-03,7` -> 01, 02, 03, 7: a range is as wide as its first number is written."""
    found: list[str] = []
    for piece in inside.split(","):
        low, dash, high = (p.strip() for p in piece.partition("-"))
        high = high if dash else low
        if not (low.isdigit() and high.isdigit()) or int(low) > int(high):
            raise _wrong(text, offset, f"'{piece}' is not a number or a rising range")
        found += [f"{n:0{len(low)}d}" for n in range(int(low), int(high) + 1)]
        offset += len(piece) + 1
    return found


def _wrong(text: str, position: int, why: str) -> ConfigError:
    return ConfigError(f"'{text}' is not a Slurm node list: {why} (position {position + 1})")
