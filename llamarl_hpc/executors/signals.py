"""What a rank does about signals: nothing, and its leader tells the controller.

Slurm sends SIGTERM to every task of a job that is preempted, cancelled or requeued, long before it
kills, and often to them alone. The controller still wants a checkpoint then, so ranks go on until
it says Stop. Only where nobody can say so any more, because the controller fell silent too, does
a signalled leader end its world.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from types import FrameType

from llamarl_hpc.channels.base import ExecutorEnd
from llamarl_hpc.errors import EXIT_STOPPED
from llamarl_hpc.placement import World

log = logging.getLogger(__name__)

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
_SILENCE_S, _TICK_S = 15.0, 1.0  # of the controller, once a signal has come


def ignore() -> None:
    """First of all, before anything is imported or connected that takes time."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)


class SignalReport:
    """In a leader: signals reach the controller by way of `channel`, whatever the rank is at."""

    def __init__(self, channel: ExecutorEnd, world: World, *, silence_s: float) -> None:
        """`silence_s`: of the controller, after which a leader leaves even unsignalled."""
        self._channel, self._world = channel, world
        self._silence_s = min(silence_s, _SILENCE_S)
        self._signalled = threading.Event()
        self._over = False
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def install(self) -> None:
        """Again once libraries are loaded, which may have put their handlers in our place."""
        for number in (signal.SIGTERM, signal.SIGUSR2):
            before = signal.getsignal(number)
            if before not in (signal.SIG_IGN, signal.SIG_DFL, self._note):
                log.warning("%s was handled by %r, which is replaced", number.name, before)
            signal.signal(number, self._note)
            signal.siginterrupt(number, False)  # libraries may not expect an interrupted call
        signal.set_wakeup_fd(self._channel.signal_fd, warn_on_full_buffer=False)

    def close(self) -> None:
        """Before the channel is closed."""
        self._over = True
        signal.set_wakeup_fd(-1)
        ignore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signalled.set()

    def _watch(self) -> None:
        self._signalled.wait()
        while not self._over:
            if self._channel.controller_silent_s > self._silence_s:
                log.warning("signalled, and the controller is silent: this rank leaves")
                self._world.abort(EXIT_STOPPED)
            time.sleep(_TICK_S)
