"""How long each executor had something to do, seen from the controller."""

from __future__ import annotations

import time
from collections.abc import Callable


class BusyClock:
    """An executor is busy while it has unanswered requests. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._outstanding: dict[str, int] = {}
        self._since: dict[str, float] = {}
        self._busy: dict[str, float] = {}

    def begin(self, executor: str, count: int = 1) -> None:
        """`count` more requests went out."""
        if self._outstanding.get(executor, 0) == 0:
            self._since[executor] = self._clock()
        self._outstanding[executor] = self._outstanding.get(executor, 0) + count

    def end(self, executor: str, count: int = 1) -> None:
        """`count` requests were answered."""
        left = self._outstanding.get(executor, 0) - count
        self._outstanding[executor] = max(0, left)
        if left <= 0 and executor in self._since:
            self._add(executor, self._clock() - self._since.pop(executor))

    def clear(self, executor: str) -> None:
        """The executor is gone; its requests are not answered any more."""
        self.end(executor, self._outstanding.get(executor, 0))

    def take(self, executor: str) -> float:
        """Busy seconds since the last `take`, including the time a current request has run."""
        now = self._clock()
        if executor in self._since:
            self._add(executor, now - self._since[executor])
            self._since[executor] = now
        return self._busy.pop(executor, 0.0)

    def _add(self, executor: str, seconds: float) -> None:
        self._busy[executor] = self._busy.get(executor, 0.0) + seconds
