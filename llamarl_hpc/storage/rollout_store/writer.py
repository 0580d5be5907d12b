"""Writing a run's rollouts: a bounded queue, one thread, files that appear whole.

    controller --append--> queue --> thread: pending groups --flush--> part of the open segment
                                             parts of a full segment --> closed segment

Who waits for whom: `append` waits only while the queue is full, `flush` and `close` until the
thread has put everything before them on disk; each with a deadline. The thread waits for nobody
but the file system. Why a kill cannot hurt what is on disk: see the package.
"""

from __future__ import annotations

import errno
import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from llamarl_hpc.errors import StoreError
from llamarl_hpc.storage import atomic
from llamarl_hpc.storage.records import GroupRecord
from llamarl_hpc.storage.rollout_store import blocks
from llamarl_hpc.storage.rollout_store.file import (
    Attributes,
    RolloutFile,
    encode,
    open_path,
    part_paths,
    segment_numbers,
    segment_path,
)
from llamarl_hpc.storage.rollout_store.layout import Block

if TYPE_CHECKING:
    from llamarl_hpc.config.schema import StorageConfig

log = logging.getLogger(__name__)

MAX_PARTS = 64  # of an open segment; bounds the number of files a reader must open
MAX_PENDING_S = 30.0  # unflushed groups are written after so long even if nobody asks
QUEUE_RECORDS = 4096
RETRY_S = 600.0  # for how long a full disk is waited out
_POLL_S = 0.25  # between looks at whether the thread is still there
_PASSING = {errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EIO, errno.EREMOTEIO}


@dataclass
class _OpenSegment:
    number: int
    blocks: list[Block] = field(default_factory=list)  # what its parts hold

    @property
    def num_rollouts(self) -> int:
        return sum(blocks.num_rows(block, "rollouts") for block in self.blocks)

    @property
    def num_bytes(self) -> int:
        return sum(blocks.num_bytes(block) for block in self.blocks)


@dataclass(frozen=True)
class _Flush:
    """A request in the queue: everything before it must be on disk before `done` is set."""

    done: threading.Event
    close: bool = False


class RolloutWriter:
    """Appends groups to the store of a run; one writer per run and attempt.

    `append` hands over to a thread; `flush` makes durable what was appended; `close` also joins
    the open segment. An error of the thread (disk full for longer than `retry_s`, ...) is raised
    by whatever is called next, as StoreError.
    """

    def __init__(
        self,
        folder: Path,
        *,
        attempt: int,
        config: StorageConfig,
        attributes: Attributes,
        reward_names: Sequence[str],
        retry_s: float = RETRY_S,
    ) -> None:
        """Starts the thread. `attributes` (run id, model, versions, ...) go into every file."""
        self._folder = folder
        self._attempt = attempt
        self._config = config
        self._attributes = {"attempt": attempt} | dict(attributes)
        self._reward_names = list(reward_names)
        self._retry_s = retry_s
        self._pending: list[GroupRecord] = []
        self._pending_bytes = 0
        self._pending_since = 0.0
        self._next_rollout_id = attempt << 32
        self._segment: _OpenSegment | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._queue: queue.Queue[GroupRecord | _Flush] = queue.Queue(QUEUE_RECORDS)
        folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._run, name="rollout-writer", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ called by others

    def append(self, record: GroupRecord, *, timeout_s: float = RETRY_S) -> None:
        """Hand over one group; waits only while the queue is full (the disk is too slow)."""
        self._check()
        self._put(record, timeout_s)

    def flush(self, timeout_s: float = RETRY_S) -> None:
        """Return once all that was appended is on disk. Raises StoreError after `timeout_s`."""
        self._check()
        self._wait(_Flush(threading.Event()), timeout_s)

    def close(self, timeout_s: float = RETRY_S) -> None:
        """Flush, close the segment, end the thread. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._raise_error()
        self._wait(_Flush(threading.Event(), close=True), timeout_s)
        self._thread.join(timeout_s)

    def _check(self) -> None:
        self._raise_error()
        if self._closed:
            raise StoreError("the rollout writer is closed")

    def _raise_error(self) -> None:
        if self._error is not None:
            raise StoreError(f"rollouts cannot be written to {self._folder}: {self._error}") from (
                self._error
            )

    def _put(self, item: GroupRecord | _Flush, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._queue.put(item, timeout=_POLL_S)
            except queue.Full:
                self._raise_error()
                if time.monotonic() > deadline:
                    raise StoreError(
                        f"the rollout writer has taken nothing for {timeout_s:.0f} s (folder "
                        f"{self._folder}); is the file system answering?"
                    ) from None

    def _wait(self, request: _Flush, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self._put(request, timeout_s)
        while not request.done.wait(_POLL_S):
            self._raise_error()
            if time.monotonic() > deadline:
                raise StoreError(
                    f"rollouts were not on disk after {timeout_s:.0f} s (folder {self._folder})"
                )
        self._raise_error()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            self._persist(self._close_leftovers)
            while not self._handle(self._next_item()):
                self._flush_if_due()
        except BaseException as error:
            log.error("the rollout writer stops: %s", error)
            self._error = error

    def _next_item(self) -> GroupRecord | _Flush | None:
        try:
            return self._queue.get(timeout=MAX_PENDING_S / 4)
        except queue.Empty:
            return None

    def _handle(self, item: GroupRecord | _Flush | None) -> bool:
        """Take one item; True when it was the last."""
        if isinstance(item, _Flush):
            self._persist(self._close_segment if item.close else self._flush_pending)
            item.done.set()
            return item.close
        if item is not None:
            self._pending_since = self._pending_since if self._pending else time.monotonic()
            self._pending.append(item)
            self._pending_bytes += _num_bytes(item)
        return False

    def _flush_if_due(self) -> None:
        waited = time.monotonic() - self._pending_since
        if self._pending and (waited > MAX_PENDING_S or self._pending_bytes > self._max_bytes):
            self._persist(self._flush_pending)

    def _persist(self, write: Callable[[], None]) -> None:
        """Call `write`; what passes (disk full, quota, stale handle) is waited out, not lost."""
        deadline, delay_s = time.monotonic() + self._retry_s, 0.25
        while True:
            try:
                return write()
            except OSError as error:
                left_s = deadline - time.monotonic()
                if error.errno not in _PASSING or left_s <= 0:
                    raise
                log.warning(
                    "rollouts cannot be written (%s); trying again for %.0f s, nothing is lost",
                    error,
                    left_s,
                )
                time.sleep(min(delay_s, left_s))
                delay_s = min(2 * delay_s, 30.0)

    @property
    def _max_bytes(self) -> int:
        return self._config.segment_mb << 20

    def _flush_pending(self, closing: bool = False) -> None:
        """Pending groups become a part of the open segment, or with its parts a closed one."""
        if not self._pending:
            return
        block = blocks.from_records(
            self._pending, reward_names=self._reward_names, first_rollout_id=self._next_rollout_id
        )
        self._segment = segment = self._segment or self._claim_segment()
        grown = _OpenSegment(segment.number, [*segment.blocks, block])
        if closing or self._is_full(grown):
            self._write_segment(grown, self._attributes)
            self._segment = None
        else:
            index = len(segment.blocks)
            attributes = self._file_attributes(segment.number, block, self._attributes)
            path = open_path(self._folder, segment.number) / f"part_{index:06d}.h5"
            atomic.write_bytes(path, encode(block, attributes | {"part": index}))
            self._segment = grown
        self._next_rollout_id += blocks.num_rows(block, "rollouts")
        self._pending.clear()
        self._pending_bytes = 0

    def _is_full(self, segment: _OpenSegment) -> bool:
        return (
            segment.num_rollouts >= self._config.segment_rollouts
            or segment.num_bytes >= self._max_bytes
            or len(segment.blocks) >= MAX_PARTS
        )

    def _close_segment(self) -> None:
        self._flush_pending(closing=True)
        if self._segment is not None:
            self._write_segment(self._segment, self._attributes)
            self._segment = None

    def _claim_segment(self) -> _OpenSegment:
        """A number that no writer has. Making the folder is the claim: only one can."""
        while True:
            number = max(segment_numbers(self._folder), default=-1) + 1
            opened = open_path(self._folder, number)
            try:
                opened.mkdir()
            except FileExistsError:
                continue
            if not segment_path(self._folder, number).exists():
                atomic.sync_folder(self._folder)
                return _OpenSegment(number)
            opened.rmdir()

    def _write_segment(self, segment: _OpenSegment, attributes: Attributes) -> None:
        """Join the parts into a closed segment, which takes their place the moment it is named."""
        if segment.blocks:
            block = blocks.join(segment.blocks)
            file_attributes = self._file_attributes(segment.number, block, attributes)
            compression = self._config.compression
            image = encode(
                block,
                file_attributes | {"part": -1},
                compression="checksum" if compression == "none" else compression,
            )
            atomic.write_bytes(segment_path(self._folder, segment.number), image)
        shutil.rmtree(open_path(self._folder, segment.number), ignore_errors=True)

    def _file_attributes(self, number: int, block: Block, attributes: Attributes) -> dict[str, Any]:
        ids = block["rollouts/rollout_id"]
        own = {
            "segment": number,
            "first_rollout_id": int(ids[0]) if len(ids) else -1,
            "num_rollouts": len(ids),
            "t_written": time.time(),
        }
        return dict(attributes) | own

    def _close_leftovers(self) -> None:
        """Close the segments that killed attempts left open. A run is locked: they are over."""
        atomic.remove_leftovers(self._folder)
        for number, closed in segment_numbers(self._folder).items():
            if closed:
                shutil.rmtree(open_path(self._folder, number), ignore_errors=True)
                continue
            try:
                self._close_leftover(number)
            except StoreError as error:  # a damaged part must not keep a run from going on
                log.warning("segment %d of an earlier attempt stays open: %s", number, error)

    def _close_leftover(self, number: int) -> None:
        segment, attributes = _OpenSegment(number), dict[str, Any]()
        for path in part_paths(open_path(self._folder, number)):
            file = RolloutFile(path, path.name)
            attributes = file.attributes
            segment.blocks.append(file.block())
            file.close()
        if attributes.get("attempt", 0) < self._attempt:
            self._write_segment(segment, attributes)


def _num_bytes(record: GroupRecord) -> int:
    """About what a group takes, uncompressed."""
    return 1024 + sum(13 * len(c.token_ids) + len(c.text) + 256 for c in record.completions)
