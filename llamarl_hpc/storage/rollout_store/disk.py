"""The threads that put a writer's files on disk, in the order in which they are handed over.

    submit --> rollout-disk-0, -1, -2: each writes one file beside its place, and syncs it
           --> rollout-names: in order, when a file is durable: its name; then the folder's sync

While one file is synced the next is written, and syncs at one time share the file system's journal:
together about as fast as one file that is only appended to. A file is named after those before it
have their names, so a kill leaves no gap. The threads wait for nobody but the file system, and wait
out what passes: a full disk, a quota, a file server that is away. Flushes that have piled up
meanwhile share one sync of the folder.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from llamarl_hpc.errors import StoreError
from llamarl_hpc.storage import atomic
from llamarl_hpc.storage.rollout_store.encode import Image
from llamarl_hpc.storage.rollout_store.segment import remove_parts

T = TypeVar("T")
log = logging.getLogger(__name__)

POLL_S = 0.25  # between looks at whether a thread is still there
FIRST_DELAY_S, MAX_DELAY_S = 0.25, 4.0  # between two tries to write; it doubles
_AT_ONCE = 3  # files that are written or synced at one time
_IMAGES = _AT_ONCE + 1  # that have no name yet: one waits for its thread
_SWITCH_S = 0.0002  # after which a busy thread lets another run Python; its default is 5 ms
_MAX_SHARED = 8  # flushes that share one sync of the folder
PASSING = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.ESTALE,  # NFS: the server has been started anew
    errno.EREMOTEIO,
    errno.ETIMEDOUT,  # NFS, mounted soft
    errno.ENOTCONN,  # FUSE, Lustre
    errno.ESHUTDOWN,  # Lustre: the client was evicted
}


@dataclass(frozen=True)
class Flush:
    """A request: everything before it must be on disk before `done` is set."""

    done: threading.Event
    close: bool = False


@dataclass(frozen=True)
class Write:
    """A file to be written."""

    path: Path
    image: Image
    replaces: Path | None = None  # parts that go once the file is durable
    beside: Future[Path] = field(default_factory=Future)  # where it is, durable, until it is named


class Disk:
    """Writes for one writer; keeps the first error of any of its threads."""

    def __init__(self, folder: Path, *, retry_s: float) -> None:
        """Starts the threads. What passes is waited out for `retry_s`."""
        # After each system call a thread waits for Python, while others build what comes next:
        # with the default, as long as for the disk. Of the whole process, which the writer shares.
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        self.error: BaseException | None = None
        self._folder, self._retry_s = folder, retry_s
        self._troubles: dict[str, str] = {}  # by thread: why it cannot write just now
        self._again = threading.Lock()
        self._room = threading.Semaphore(_IMAGES)
        self._jobs: queue.SimpleQueue[Write | Flush] = queue.SimpleQueue()  # to be named, in order
        self._unwritten: queue.SimpleQueue[Write | None] = queue.SimpleQueue()
        self._replaced: list[Path] = []  # parts of closed segments; removed when nothing waits
        self._threads = [self.start(self._name, "rollout-names")]
        self._threads += [self.start(self._write, f"rollout-disk-{i}") for i in range(_AT_ONCE)]

    @property
    def trouble(self) -> str:
        """Why nothing can be written just now; empty when all is well."""
        return next(iter(self._troubles.copy().values()), "")

    def raise_error(self) -> None:
        if self.error is not None:
            raise StoreError(f"rollouts cannot be written to {self._folder}: {self.error}") from (
                self.error
            )

    def start(self, target: Callable[[], None], name: str) -> threading.Thread:
        """A thread beside this one; its error ends all that is written."""

        def guarded() -> None:
            try:
                target()
            except BaseException as error:
                log.error("the rollout writer stops: %s", error)
                self.error = self.error or error

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        return thread

    def submit(self, job: Write | Flush) -> None:
        """Hand over; waits while the disk is behind, and not for one that has failed."""
        while self.error is None:
            if isinstance(job, Flush):
                return self._jobs.put(job)
            if self._room.acquire(timeout=POLL_S):
                self._jobs.put(job)
                return self._unwritten.put(job)
        raise StoreError("an earlier write has failed")

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the threads, after a flush that closes."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))

    def persist(self, write: Callable[[], T]) -> T:
        """Call `write`, in whatever thread; what passes is waited out, not lost."""
        deadline, delay_s = time.monotonic() + self._retry_s, FIRST_DELAY_S
        me = threading.current_thread().name
        again: AbstractContextManager[object] = nullcontext()
        while True:
            try:
                with again:
                    done = write()
                self._troubles.pop(me, None)
                return done
            except OSError as error:
                self._troubles[me] = str(error)
                left_s = deadline - time.monotonic()
                if error.errno not in PASSING or left_s <= 0:
                    raise
                log.warning(
                    "rollouts cannot be written (%s); trying again for %.0f s, nothing is lost",
                    error,
                    left_s,
                )
                again = self._again  # one at a time: two could fill the disk and fail for ever
                time.sleep(min(delay_s, left_s))
                delay_s = min(2 * delay_s, MAX_DELAY_S)

    # ------------------------------------------------------------ the threads

    def _write(self) -> None:
        while (job := self._unwritten.get()) is not None:
            try:
                write = partial(atomic.write_beside, job.path, job.image)
                job.beside.set_result(self.persist(write))
            except BaseException as error:
                job.beside.set_exception(error)  # it counts when its turn has come

    def _name(self) -> None:
        try:
            self._name_in_order()
        finally:
            for _ in range(_AT_ONCE):
                self._unwritten.put(None)
            while not self._jobs.empty():  # only after an error
                job = self._jobs.get()
                if isinstance(job, Write):
                    job.beside.add_done_callback(_remove)

    def _name_in_order(self) -> None:
        written, flushes = list[Write](), list[Flush]()
        while True:
            try:
                job = self._jobs.get(block=not (written or flushes or self._replaced))
            except queue.Empty:
                if written or flushes:
                    self._settle(written, flushes)
                else:
                    remove_parts(self._replaced.pop())
                continue
            if isinstance(job, Write):
                self.persist(partial(os.replace, job.beside.result(), job.path))
                self._room.release()
                written.append(job)
                continue
            flushes.append(job)
            if job.close or len(flushes) == _MAX_SHARED:
                self._settle(written, flushes)
            if job.close:
                for parts in self._replaced:
                    remove_parts(parts)
                return

    def _settle(self, written: list[Write], flushes: list[Flush]) -> None:
        """Make the names of what was written durable, then say so."""
        for folder in {job.path.parent for job in written}:
            self.persist(partial(atomic.sync_folder, folder))
        self._replaced += [job.replaces for job in written if job.replaces is not None]
        for flush in flushes:
            flush.done.set()
        written.clear()
        flushes.clear()


def _remove(beside: Future[Path]) -> None:
    if beside.exception() is None:
        beside.result().unlink(missing_ok=True)
