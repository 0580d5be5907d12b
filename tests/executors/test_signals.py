"""Ranks go on when they are signalled; a leader tells, and leaves only with the controller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamarl_hpc.executors import signals
from llamarl_hpc.placement import World


class Channel:
    """A channel whose end for signals is a pipe."""

    def __init__(self) -> None:
        self.read_fd, self.signal_fd = os.pipe()
        os.set_blocking(self.signal_fd, False)
        self.controller_silent_s = 0.0


class Leader(World):
    """Notes that it was to leave."""

    left: list[int]

    def abort(self, code: int) -> None:  # type: ignore[override]
        self.left.append(code)


@pytest.fixture
def channel() -> Iterator[Channel]:
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)}
    made = Channel()
    yield made
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)
    os.close(made.read_fd)
    os.close(made.signal_fd)


def leader() -> Leader:
    world = Leader()
    object.__setattr__(world, "left", [])
    return world


def test_every_signal_reaches_the_channel_and_nothing_ends(channel: Channel) -> None:
    world = leader()
    report = signals.SignalReport(channel, world, silence_s=60.0)  # type: ignore[arg-type]
    report.install()
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGTERM):
        os.kill(os.getpid(), number)
        assert os.read(channel.read_fd, 1) == bytes([number])
    report.close()
    os.kill(os.getpid(), signal.SIGTERM)  # ignored
    assert world.left == []


def test_a_handler_of_a_library_is_replaced_and_named(
    channel: Channel, caplog: pytest.LogCaptureFixture
) -> None:
    report = signals.SignalReport(channel, leader(), silence_s=60.0)  # type: ignore[arg-type]
    report.install()
    signal.signal(signal.SIGUSR2, print)
    report.install()
    assert [r.message for r in caplog.records] == [
        "SIGUSR2 was handled by <built-in function print>, which is replaced"
    ]
    report.close()


def test_a_signalled_leader_leaves_when_the_controller_is_silent_too(channel: Channel) -> None:
    world = leader()
    report = signals.SignalReport(channel, world, silence_s=0.5)  # type: ignore[arg-type]
    report.install()
    channel.controller_silent_s = 1.0
    time.sleep(0.1)
    assert world.left == []  # silence alone is the heartbeat's business
    os.kill(os.getpid(), signal.SIGTERM)
    deadline = time.monotonic() + 10.0
    while not world.left:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    report.close()
    assert world.left[0] == 4


def test_a_rank_ignores_signals_from_its_first_moment(tmp_path: Path) -> None:
    code = (
        "import os, signal\n"
        "from llamarl_hpc.executors import signals\n"
        "signals.ignore()\n"
        "for n in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT): os.kill(os.getpid(), n)\n"
        "print('alive')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "alive\n"
