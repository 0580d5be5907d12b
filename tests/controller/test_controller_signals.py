"""Signals to the controller's process, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import asyncio, os, signal, threading, time
from llamarl_hpc.controller import signals

ALL = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
names, is_over = set(), threading.Event()

def pester():
    while not is_over.wait(0.0001):
        for number in ALL:
            os.kill(os.getpid(), number)

async def attempt():
    with signals.heard_by(names.add):
        pest.start()
        while len(names) < len(ALL):
            await asyncio.sleep(0.001)

pest = threading.Thread(target=pester)
asyncio.run(attempt())
time.sleep(0.1)
is_over.set()
print(sorted(names))
"""


def test_signals_are_heard_during_an_attempt_and_never_kill_while_it_is_left() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "['SIGHUP', 'SIGINT', 'SIGTERM', 'SIGUSR2']\n"
