"""One background thread that fetches versions, one after the other, while decoding goes on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from llamarl_hpc.weight_sync.base import StagedWeights

Fetch = Callable[[], StagedWeights]


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
