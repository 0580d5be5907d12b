r"""Numbers as people and models write them: `$1,000.00`, `\$1{,}000`, `3/4`, `1\frac{1}{2}`, `50%`.

A grammar and not a search: text is one number, or it is none. `1,00`, `3rd` and `5x` are none,
and so is what is still to be worked out: `12 + 7`, `2^3`, `6/2` (a fraction that is an integer).
Values are exact fractions, so 0.1 is one tenth and 0.333 is not a third.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

_MAX_LENGTH = 200  # characters; longer texts are no numbers
_MAX_EXPONENT = 400

# 1,000,000 | 1 000 000 | 1000, with decimals; or .5
_DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?:\.\d*)?|\.\d+)"
_NUMBER = rf"(?P<sign>[-+]?)\s*(?P<digits>{_DIGITS})(?:[eE](?P<exponent>[-+]?\d{{1,4}}))?"
_PLAIN = re.compile(rf"{_NUMBER}(?P<rest>.*)", re.DOTALL)
_RATIO = re.compile(
    rf"(?P<sign>[-+]?)\s*(?P<top>{_DIGITS})\s*/\s*(?P<bottom>-?\s*{_DIGITS})(?P<rest>.*)"
)
_FRACTION = re.compile(
    r"(?P<sign>[-+]?)\s*(?P<whole>\d+)?\s*\\frac\{(?P<top>-?\d+)\}\{(?P<bottom>-?\d+)\}(?P<rest>.*)"
)
_SCIENTIFIC = re.compile(
    rf"{_NUMBER}\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{{?(?P<power>-?\d{{1,3}})\}}?(?P<rest>.*)"
)
_MIXED = re.compile(r"(?P<sign>[-+]?)\s*(?P<whole>\d+) (?P<top>\d+)/(?P<bottom>\d+)(?P<rest>.*)")

# What may follow a number without changing its value: words ("12 apples left"), or a unit that
# is written without a blank. A single letter is a variable unless it is one of these units.
_WORDS = re.compile(r"\s+(?:[A-Za-z]{2,}|[mgshL])(?:[/\s-]+[A-Za-z]+){0,4}(?:\^[23])?")
_ATTACHED = re.compile(r"(?:km|cm|mm|kg|mg|ml|lbs?|oz|ft|mi|hrs?|min|secs?|mph|kmh?)(?:\^[23])?")
# Words after which the number in front is not the whole story, or that are mathematics.
_MEANINGFUL = frozenset(
    re.findall(
        r"\w+",
        "and or to by of plus minus times over half quarter third hundred thousand million billion "
        "trillion dozen squared cubed sin cos tan cot sec csc log ln exp sqrt pi mod choose",
    )
)
_PERCENT = re.compile(r"\s*(?:%|percent|per cent)")
_PERIOD = re.compile(r"[.!]?\s*")


@lru_cache(maxsize=8192)
def read_number(text: str) -> frozenset[Fraction] | None:
    """What `text` can mean as a number: one value, two for a percentage (50% is 50 or 1/2).

    `text` is normalised (see equality.py): no LaTeX delimiters, `\\dfrac` or thin spaces.
    """
    text = text.strip()
    if not text or len(text) > _MAX_LENGTH:
        return None
    text = re.sub(r"^([-+]?)\s*[$\u20ac\u00a3]\s*", r"\1", text)  # currency, sign before or after
    for pattern, value_of in _FORMS:
        found = pattern.fullmatch(text)
        if found is not None:
            return _readings(value_of(found), found["rest"])
    return None


def _readings(value: Fraction | None, rest: str) -> frozenset[Fraction] | None:
    if value is None:
        return None
    percent = _PERCENT.match(rest)
    if percent is not None:
        rest = rest[percent.end() :]
    elif (unit := _ATTACHED.match(rest) or _WORDS.match(rest)) is not None:
        if _MEANINGFUL & set(re.findall(r"[a-z]+", unit.group().lower())):
            return None
        rest = rest[unit.end() :]
    if not _PERIOD.fullmatch(rest):
        return None
    return frozenset({value, value / 100} if percent is not None else {value})


def _plain(found: re.Match[str]) -> Fraction | None:
    exponent = int(found["exponent"] or 0) + int(found.groupdict().get("power") or 0)
    if abs(exponent) > _MAX_EXPONENT:
        return None
    return _signed(found, _decimal(found["digits"]) * Fraction(10) ** exponent)


def _ratio(found: re.Match[str]) -> Fraction | None:
    bottom = _decimal(found["bottom"].replace(" ", "").removeprefix("-"))
    if bottom == 0:
        return None
    value = _decimal(found["top"]) / bottom
    if value.denominator == 1:
        return None
    return _signed(found, -value if found["bottom"].startswith("-") else value)


def _mixed(found: re.Match[str]) -> Fraction | None:
    """`1\\frac{1}{2}` is one and a half, never a product."""
    top, bottom = int(found["top"]), int(found["bottom"])
    if bottom == 0:
        return None
    part = Fraction(top, bottom)
    if part.denominator == 1:
        return None
    return _signed(found, int(found["whole"] or 0) + part)


def _decimal(digits: str) -> Fraction:
    plain = digits.replace(",", "").replace(" ", "")
    return Fraction(plain.removesuffix(".") or "0")


def _signed(found: re.Match[str], value: Fraction) -> Fraction:
    return -value if found["sign"] == "-" else value


_FORMS = (
    (_MIXED, _mixed),
    (_FRACTION, _mixed),
    (_RATIO, _ratio),
    (_SCIENTIFIC, _plain),
    (_PLAIN, _plain),
)
