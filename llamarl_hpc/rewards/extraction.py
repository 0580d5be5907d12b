r"""Where a completion states its answer. Several answers that cannot be told apart are none.

The rule, in order; the first that applies decides:

1. The last complete `\boxed{...}` (or `\fbox`), braces balanced. `\boxed{}` is an empty answer,
   which is wrong; a box that was cut off counts as no answer, unless a complete one came before.
2. What follows the last `####`, to the end of that line.
3. A text that is one number, or one line of mathematics without words: all of it.
4. In the last line that has a digit or a formula:
   a. what follows "answer is" or "answer:", if that is one number or one formula;
   b. the only formula between dollar signs, if there is exactly one;
   c. the only number, if there is exactly one; else
   d. the last number, if "=", ":", "is", "equals", ... stands right before it
      ("12 + 7 = 19", "The sum of 12 and 7 is 19."; but not "5 or 6").
   Numbers of a list ("2. ...", "Step 2"), ordinals ("3rd") and numbers in names ("x2") are not
   looked at; a number that is written wrongly ("1,00") makes the line unusable.

Of an arithmetic equation ("12 + 7 = 19"), wherever it was found, the last side is the answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from llamarl_hpc.rewards.equality import normalise
from llamarl_hpc.rewards.numbers import read_number

_BOX = re.compile(r"\\+(?:boxed|fbox)(?![A-Za-z])\s*")
_MARK = re.compile(r"####[ \t]*\n?[ \t]*([^\n]*)")
_WORD = re.compile(r"[A-Za-z]{2,}")
_COMMAND = re.compile(r"\\[A-Za-z]+(?:\{[A-Za-z ]*\})?")
_ANSWER = re.compile(r"\banswer\b(?:\s+(?:is|was|equals)\b|\s*[:=])(?:\s*[:=])?\s*", re.IGNORECASE)
_FORMULA = re.compile(
    r"(?<!\\)\$(?![\s$])([^$\n]+?)(?<![\s\\])\$(?!\d)|\\\((.+?)\\\)|\\\[(.+?)\\\]"
)
_LIST_NUMBER = re.compile(r"^\s*(?:[-*>#]+\s*)?(?:step\s+)?\d+\s*[.):](?=\s)", re.IGNORECASE)
_NUMBER = re.compile(
    r"(?<![A-Za-z_^{\\\d.,:/])"
    r"(?P<core>(?:\d[\d,]*(?:\.\d[\d,.]*)?|\.\d+)(?:[/:]\d[\d,.]*)*)"
    r"(?P<after>[A-Za-z_^]*)"
)
_ORDINAL = re.compile(r"(?:st|nd|rd|th)\b")
_SIGN = re.compile(
    r"(?:(?:^|[=:(\[\u2248]|\b(?:is|are|be|equals|to|answer))\s*-\s*|(?:^|[^\d)\s]\s+)-)\$?$"
)
_INTRODUCED = re.compile(
    r"(?:[=:\u2248]|\\approx|\b(?:is|are|was|were|be|equals?|equal to|answer|gives?|makes?|gets?))"
    r"\s*(?:exactly|about|approximately|only|just)?\s*-?\s*\$?\s*$",
    re.IGNORECASE,
)


_ARITHMETIC = re.compile(
    r"(?:[\d\s+*/^().,$=-]|\\(?:times|cdot|div|frac|left|right)(?![a-z])|[{}\u00d7\u00f7])+"
)


def extract_answer(text: str) -> str | None:
    """The answer as it stands in `text`, or None; "" for an empty box."""
    answer = _find(text)
    if answer is not None and "=" in answer:
        left, _, right = answer.rpartition("=")
        if _ARITHMETIC.fullmatch(left):
            return right.strip()
    return answer


def _find(text: str) -> str | None:
    boxed = _BOX.search(text)
    if boxed is not None:
        return last_box(text)
    if "####" in text:
        marked = _MARK.findall(text)[-1].strip()
        return marked or None
    stripped = text.strip()
    if stripped and "\n" not in stripped and _is_answer(stripped):
        return stripped
    for line in reversed(stripped.splitlines()):
        if any(c.isdigit() for c in line) or _FORMULA.search(line):
            return _from_line(_LIST_NUMBER.sub("", line))
    return None


def last_box(text: str) -> str | None:
    r"""Content of the last complete box; `\boxed 5` is a box of one token. None if all are cut."""
    for found in reversed(list(_BOX.finditer(text))):
        start = found.end()
        if text[start : start + 1] == "{":
            end = _closing(text, start)
            if end is not None:
                return text[start + 1 : end].strip()
        elif start > found.start() and (token := re.match(r"[^\s$.,;{}]+", text[start:])):
            return token.group()
    return None


def _closing(text: str, start: int) -> int | None:
    """Index of the brace that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        if text[index] == "\\":
            continue
        escaped = text[index - 1] == "\\" if index else False
        if text[index] == "{" and not escaped:
            depth += 1
        elif text[index] == "}" and not escaped:
            depth -= 1
            if depth == 0:
                return index
    return None


def _is_answer(text: str) -> bool:
    """One number with or without unit, or mathematics without words."""
    plain = normalise(text)
    if read_number(plain) is not None:
        return True
    return not _WORD.search(_COMMAND.sub("", text)) and any(c.isalnum() for c in text)


# ------------------------------------------------------------------------------ one line


def _from_line(line: str) -> str | None:
    stated = list(_ANSWER.finditer(line))
    if stated:
        rest = line[stated[-1].end() :].strip().rstrip(".").strip("*` ")
        if rest and _is_answer(rest):
            return rest
    formulas = [next(group for group in f if group) for f in _FORMULA.findall(line)]
    if formulas:
        return formulas[0] if len(formulas) == 1 else None
    return _number_in(line)


@dataclass(frozen=True, slots=True)
class _Found:
    text: str
    introduced: bool


def _number_in(line: str) -> str | None:
    plain = _bare(line)
    found = [number for match in _NUMBER.finditer(plain) for number in _numbers(match, plain)]
    if not found or any(read_number(number.text) is None for number in found):
        return None
    if len(found) == 1 or found[-1].introduced:
        return found[-1].text
    return None


def _bare(line: str) -> str:
    """The line without emphasis and with plain thousands separators and signs."""
    for old, new in (
        ("**", ""),
        ("`", ""),
        (r"\$", "$"),
        ("{,}", ","),
        (r"\!", ""),
        ("\u2212", "-"),
    ):
        line = line.replace(old, new)
    return line


def _numbers(match: re.Match[str], line: str) -> list[_Found]:
    if _ORDINAL.match(match["after"]):
        return []
    core = match["core"].rstrip(",.:")
    before = line[: match.start()]
    sign = "-" if _SIGN.search(before) else ""
    percent = "%" if line[match.end("core") :].startswith("%") else ""
    if match["after"] and read_number(core + match["after"]) is None:
        return [_Found(core + match["after"], False)]  # 2x, 10^6: no plain number
    return [_Found(sign + core + percent, _INTRODUCED.search(before) is not None)]
