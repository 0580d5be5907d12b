r"""Whether two answers say the same: exact numbers first, then structure, then math-verify.

    normalise -> equal numbers? -> equal text? -> tuple, interval, set, list -> symbolic

The comparison is symmetric. A number equals numbers only: `12 + 7` or `2^3` for 19 or 8 would let
a model earn its reward by repeating the question. Tuples and intervals are ordered and keep their
brackets, sets and bare lists are not. An answer that could occupy a computer algebra system for
ever (towers of powers, large factorials) is refused unseen; the pool's limits stand behind that.
"""

from __future__ import annotations

import logging
import re
from functools import cache, lru_cache
from typing import Any

from llamarl_hpc.rewards.numbers import read_number

_MAX_LENGTH = 300  # characters that are handed to computer algebra

_REPLACED = (
    ("\u2212", "-"),
    ("\u2013", "-"),
    ("\u00a0", " "),
    ("\u2009", " "),
    ("\u202f", " "),
    ("\u00d7", r"\times "),
    ("\u00b0", ""),
    ("{,}", ","),
    (r"\$", ""),
    (r"\%", "%"),
    (r"\left", ""),
    (r"\right", ""),
    (r"\displaystyle", ""),
    (r"\degree", ""),
    ("**", ""),
    ("`", ""),
    ("~", " "),
)
_PATTERNS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\\\(?=[a-zA-Z]{2,})", r"\\"),  # \\frac: escaped twice on its way here
        (r"(?<!\\)\\!\s*", ""),
        (r"(?<!\\)\\[,;: ]", " "),
        (r"(?<!\\)\\[()\[\]]|\$", ""),
        (r"\\[dt]frac", r"\\frac"),
        (r"\\(?:mbox|mathrm|textbf|textrm|mathbf|textit|operatorname)(?![a-zA-Z])", r"\\text"),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)", ""),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"\\frac\s*(\{[^{}]*\})\s*(\d)", r"\\frac\1{\2}"),
        (r"\\frac\s*\{\s*([^{}]*?)\s*\}\s*\{\s*([^{}]*?)\s*\}", r"\\frac{\1}{\2}"),
        (r"\\sqrt\s*(\w)", r"\\sqrt{\1}"),
        (r"([_^])\s*\{\s*(\w)\s*\}", r"\1\2"),
        (r"(?<=[\d}])\s*\\text\s*\{[^{}]*\}(?:\^[23])?\s*$", ""),  # a unit
        (r"^\s*\\text\s*\{\s*([^{}]*?)\s*\}\s*$", r"\1"),
        (r"^\s*\{(.*)\}\s*$", r"\1"),
        (r"^\s*\(([A-Za-z])\)\s*$", r"\1"),  # (B), one of several choices
        (r"\s+", " "),
    )
)
_DEFINITION = re.compile(r"^\s*[a-zA-Z](?:\([a-z]\))?\s*(?:=(?!=)|\\in(?![a-zA-Z]))\s*(?=\S)")


@lru_cache(maxsize=8192)
def normalise(text: str) -> str:
    """One spelling for what is written in many: delimiters, units, `x =`, spacing, fractions."""
    for old, new in _REPLACED:
        text = text.replace(old, new)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    text = _DEFINITION.sub("", text.strip())
    return text.strip().removeprefix("=").rstrip(".,;").strip()


def equal(gold: str, answer: str) -> bool:
    """True when both mean the same. Empty answers equal nothing."""
    return _equal(normalise(gold), normalise(answer))


def _equal(a: str, b: str) -> bool:
    if not a or not b:
        return False
    number_a, number_b = read_number(a), read_number(b)
    if number_a is not None and number_b is not None:
        return not number_a.isdisjoint(number_b)
    if _compact(a) == _compact(b):
        return True
    if number_a is not None or number_b is not None:
        return False
    items_a, items_b = _items(a), _items(b)
    if items_a is not None and items_b is not None:
        return _same_items(items_a, items_b)
    if items_a is not None or items_b is not None or _is_text(a) or _is_text(b):
        return False
    return symbolically_equal(a, b)


def _compact(text: str) -> str:
    """Without blanks, except between digits; words in lower case."""
    if _is_text(text):
        return re.sub(r"\s+", "", text).lower()
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def _is_text(text: str) -> bool:
    """Words and nothing else: compared letter by letter, in either case."""
    return re.fullmatch(r"[A-Za-z][A-Za-z\s'-]*[A-Za-z]", text) is not None


# ------------------------------------------------------------------------------ structure

_Items = tuple[str, tuple[str, ...]]  # brackets "()", "[)", "{}", "" and what is between


@lru_cache(maxsize=4096)
def _items(text: str) -> _Items | None:
    """A tuple, interval, set or bare list as its brackets and items; None for anything else."""
    for opening, closing in ((r"\{", r"\}"), ("{", "}")):
        if text.startswith(opening) and text.endswith(closing):
            inner = _split(text[len(opening) : -len(closing)])
            return ("{}", inner) if inner is not None else None
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and _closes_at_end(text):
        inner = _split(text[1:-1])
        return (text[0] + text[-1], inner) if inner is not None and len(inner) > 1 else None
    inner = _split(text)
    return ("", inner) if inner is not None and len(inner) > 1 else None


def _closes_at_end(text: str) -> bool:
    depth = 0
    for index, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        if depth == 0:
            return index == len(text) - 1
    return False


def _split(text: str) -> tuple[str, ...] | None:
    """At the commas outside brackets; None when brackets do not match or an item is empty."""
    depth, start, items = 0, 0, []
    for index, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return None
        if char == "," and depth == 0:
            items.append(text[start:index])
            start = index + 1
    items = [normalise(item) for item in (*items, text[start:])]
    return tuple(items) if depth == 0 and all(items) else None


def _same_items(a: _Items, b: _Items) -> bool:
    (brackets_a, items_a), (brackets_b, items_b) = a, b
    if len(items_a) != len(items_b):
        return False
    unordered = {brackets_a, brackets_b} <= {"", "{}"}
    if not unordered:
        same = brackets_a == brackets_b
        return same and all(_equal(x, y) for x, y in zip(items_a, items_b, strict=True))
    left = list(items_b)
    for item in items_a:
        match = next((other for other in left if _equal(item, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True


# ------------------------------------------------------------------------------ algebra

_HEAVY = re.compile(
    r"\^\s*\{?[^{}]*\^"  # a power in an exponent
    r"|\^\s*\{?\s*-?\d{4,}"  # a large exponent
    r"|\d{3,}\s*!|!\s*!|\)\s*!"  # a large factorial
    r"|\*\*"
)


@lru_cache(maxsize=8192)
def symbolically_equal(a: str, b: str) -> bool:
    """math-verify's verdict in either order; False for what it cannot read or should not."""
    if max(len(a), len(b)) > _MAX_LENGTH or _HEAVY.search(a) or _HEAVY.search(b):
        return False
    parsed_a, parsed_b = _parse(a), _parse(b)
    if not parsed_a or not parsed_b:
        return False
    # no timeouts: they are signals, which belong to the main thread; the pool has its own
    return any(
        _algebra().verify(list(x), list(y), timeout_seconds=None, float_rounding=6)
        for x, y in ((parsed_a, parsed_b), (parsed_b, parsed_a))
    )


@lru_cache(maxsize=4096)
def _parse(text: str) -> tuple[Any, ...]:
    config = (_algebra().LatexExtractionConfig(),)
    return tuple(_algebra().parse(f"${text}$", config, parsing_timeout=None))


@cache
def _algebra() -> Any:
    """math_verify, imported when the first answer needs it (half a second, sympy)."""
    import math_verify

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)  # each warns that it has no timeout
    return math_verify
