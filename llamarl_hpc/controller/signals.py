"""Signals to the controller's process: heard during an attempt, ignored from its end on.

What is left to write down then takes a moment, which neither an impatient Ctrl-C may cost nor
Slurm, which signals several times while it takes a job away. Never, not even for an instant, is a
signal left to its default, which kills: a loop's own handlers end like that, when it is closed.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


def ignore() -> None:
    """From now on."""
    for number in _ALL:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def heard_by(hear: Callable[[str], None]) -> Iterator[None]:
    """In a coroutine of the main thread: `hear` is called by its loop, with the name of a signal.
    SIGHUP stays ignored where it was (nohup)."""
    loop = asyncio.get_running_loop()

    def note(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(hear, signal.Signals(number).name)

    for number in _ALL:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, note)
    try:
        yield
    finally:
        ignore()
