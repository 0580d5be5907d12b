"""Slurm's six ways to write a time limit, read to seconds and written in one of them."""

from __future__ import annotations

import re

from llamarl_hpc.errors import ConfigError

_FORM = re.compile(r"(?:(?P<days>\d+)-)?(?P<fields>\d+(?::\d+){0,2})")
_NO_LIMIT = ("unlimited", "infinite")


def parse_time(text: str) -> int | None:
    """Seconds; None where there is no limit (UNLIMITED, or 0, with which Slurm means the same).

    `90` are minutes, `30:00` minutes and seconds, `1:30:00` hours too; after days (`1-0`) the first
    number is hours. Raises ConfigError.
    """
    if text.strip().lower() in _NO_LIMIT:
        return None
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"'{text}' is not a time limit; wanted minutes, HH:MM:SS or D-HH:MM:SS, such as "
            "04:00:00"
        )
    numbers = [int(n) for n in match["fields"].split(":")]
    if match["days"] is not None:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        hours += 24 * int(match["days"])
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, minutes, seconds = 0, *(*numbers, 0)[:2]
    return (hours * 60 + minutes) * 60 + seconds or None


def format_time(seconds: float) -> str:
    """`D-HH:MM:SS`, rounded up to whole minutes, which is what Slurm counts in."""
    minutes = -int(-seconds // 60)
    days, minutes = divmod(minutes, 24 * 60)
    return f"{days}-{minutes // 60:02d}:{minutes % 60:02d}:00"
