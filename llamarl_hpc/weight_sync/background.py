"""Threads behind the main one: those that send and tidy up, and the one that fetches versions."""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable

from llamarl_hpc.weight_sync.base import StagedWeights

Fetch = Callable[[], StagedWeights]

_EXIT_S = 5.0
_threads: list[threading.Thread] = []


def run_in_background(work: Callable[[], None], name: str) -> None:
    """Run `work` in a thread that cannot keep the process from ending for more than a moment.

    A moment it gets: a thread that Python stops within C++ code takes the process down with an
    abort, whatever its exit code should have been.
    """
    if not _threads:
        atexit.register(_wait_for_threads)
    _threads[:] = [thread for thread in _threads if thread.is_alive()]
    thread = threading.Thread(target=work, name=name, daemon=True)
    _threads.append(thread)
    thread.start()


def _wait_for_threads() -> None:
    deadline = time.monotonic() + _EXIT_S
    for thread in _threads:
        thread.join(max(deadline - time.monotonic(), 0.0))


class Fetcher:
    """Runs fetches in order. A staged version must be released before the next one begins.

    The thread is a daemon: a fetch that hangs in the network never keeps a process from ending.
    """

    def __init__(self) -> None:
        self.closing = threading.Event()  # fetches look at it and give up
        self._fetches: queue.SimpleQueue[Fetch | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StagedWeights | Exception] = queue.SimpleQueue()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()

    def submit(self, fetch: Fetch) -> None:
        self._fetches.put(fetch)

    def poll(self) -> StagedWeights | None:
        """The next fetch's result, None while it is under way. Raises what the fetch raised."""
        try:
            result = self._results.get_nowait()
        except queue.Empty:
            return None
        if isinstance(result, Exception):
            raise result
        return result

    def released(self) -> None:
        """The version that `poll` returned is not needed any more."""
        self._released.set()

    def close(self) -> None:
        """Ask the thread to end and give it a moment."""
        self.closing.set()
        self._released.set()
        self._fetches.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while (fetch := self._fetches.get()) is not None and not self.closing.is_set():
            self._released.clear()
            try:
                staged = fetch()
            except Exception as error:  # raised again in the main thread by `poll`
                self._results.put(error)
                continue
            self._results.put(staged)
            self._released.wait()
