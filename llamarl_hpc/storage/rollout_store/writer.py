"""Writing a run's rollouts: bounded queues, three threads, files that appear whole.

    controller --append--> queue --> rollout-writer: pending groups --flush--> image of a file
        image --> queue --> rollout-disk: a part of the open segment, or a segment of its own
        parts of a full segment --> rollout-joiner: image of a closed one --> rollout-disk

Who waits for whom: `append` waits only while the queue is full, `flush` and `close` until the
disk has everything before them; each with a deadline. The writer waits for the disk (two images
ahead of it at most) and for the joiner (one segment at a time). The disk thread does things in the
order they were handed over and waits for nobody but the file system; flushes that have piled up
meanwhile share one sync of the folder. Why a kill cannot hurt what
is on disk: see the package.
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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from llamarl_hpc.errors import StoreError
from llamarl_hpc.storage import atomic
from llamarl_hpc.storage.records import GroupRecord
from llamarl_hpc.storage.rollout_store import blocks, build
from llamarl_hpc.storage.rollout_store.encode import Attributes, Image, encode
from llamarl_hpc.storage.rollout_store.file import (
    RolloutFile,
    open_path,
    part_paths,
    segment_numbers,
    segment_path,
)
from llamarl_hpc.storage.rollout_store.filters import check_available
from llamarl_hpc.storage.rollout_store.layout import Block

if TYPE_CHECKING:
    from llamarl_hpc.config.schema import StorageConfig

T = TypeVar("T")
log = logging.getLogger(__name__)

MAX_PARTS = 64  # of an open segment; bounds the number of files a reader must open
MAX_PENDING_S = 30.0  # unflushed groups are written after so long even if nobody asks
QUEUE_RECORDS = 4096
RETRY_S = 600.0  # for how long a full disk is waited out
DIRECT_SHARE = 32  # uncompressed, a flush of 1/32 segment is closed at once: not written twice
_POLL_S = 0.25  # between looks at whether the thread is still there
_MAX_DELAY_S = 4.0  # between two tries to write
_IMAGES = 2  # built ahead of the disk
_MAX_SHARED = 4  # flushes that share one sync of the folder
_PASSING = {errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EIO, errno.EREMOTEIO}


@dataclass
class _OpenSegment:
    number: int
    blocks: list[Block] = field(default_factory=list)  # what its parts hold
    num_rollouts: int = 0
    num_bytes: int = 0

    def add(self, block: Block) -> None:
        self.blocks.append(block)
        self.num_rollouts += blocks.num_rows(block, "rollouts")
        self.num_bytes += blocks.num_bytes(block)


@dataclass(frozen=True)
class _Flush:
    """A request in the queue: everything before it must be on disk before `done` is set."""

    done: threading.Event
    close: bool = False


@dataclass(frozen=True)
class _Write:
    """A file for the disk thread."""

    path: Path
    image: Image
    replaces: Path | None = None  # parts that go once the file is durable


class RolloutWriter:
    """Appends groups to the store of a run; one writer per run and attempt.

    `append` hands over to a thread; `flush` makes durable what was appended; `close` also joins
    the open segment. An error of a thread (disk full for longer than `retry_s`, ...) is raised
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
        """Starts the threads. `attributes` (run id, model, versions, ...) go into every file.

        Raises ConfigError for a compression that cannot be written here.
        """
        check_available(config.compression)
        self._folder = folder
        self._attempt = attempt
        self._config = config
        self._attributes = {"attempt": attempt} | dict(attributes)
        self._reward_names = list(reward_names)
        self.trouble = ""  # why nothing can be written just now; empty when all is well
        self._retry_s = retry_s
        self._pending: list[GroupRecord] = []
        self._pending_bytes = 0
        self._pending_since = 0.0
        self._next_rollout_id = attempt << 32
        self._segment: _OpenSegment | None = None
        self._last_number = -1  # segments up to this one are taken
        self._error: BaseException | None = None
        self._closed = False
        self._queue: queue.Queue[GroupRecord | _Flush] = queue.Queue(QUEUE_RECORDS)
        self._jobs: queue.Queue[_Write | _Flush] = queue.Queue(_IMAGES)
        self._joiner: threading.Thread | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._thread = self._start(self._run, "rollout-writer")
        self._disk = self._start(self._run_disk, "rollout-disk")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ called by others

    def append(self, record: GroupRecord, *, timeout_s: float = RETRY_S) -> None:
        """Hand over one group; waits only while the queue is full (the disk is too slow)."""
        self._check()
        self._put(record, timeout_s)

    def flush(self, timeout_s: float = RETRY_S, *, wait: bool = True) -> None:
        """Return once all that was appended is on disk. Raises StoreError after `timeout_s`.

        Without `wait` it is only asked for, and goes on beside the caller.
        """
        self._check()
        request = _Flush(threading.Event())
        if wait:
            self._wait(request, timeout_s)
        else:
            self._put(request, timeout_s)

    def close(self, timeout_s: float = RETRY_S) -> None:
        """Flush, close the segment, end the thread. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._raise_error()
        self._wait(_Flush(threading.Event(), close=True), timeout_s)
        self._thread.join(timeout_s)
        self._disk.join(timeout_s)

    @property
    def has_failed(self) -> bool:
        """It has given up; the next call says why."""
        return self._error is not None

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

    # ------------------------------------------------------------ the threads

    def _start(self, target: Callable[[], None], name: str) -> threading.Thread:
        def guarded() -> None:
            try:
                target()
            except BaseException as error:
                log.error("the rollout writer stops: %s", error)
                self._error = self._error or error

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        self._persist(self._close_leftovers)
        while not self._handle(self._next_item()):
            self._flush_if_due()

    def _run_disk(self) -> None:
        written, flushes = list[_Write](), list[_Flush]()
        while True:
            try:
                job = self._jobs.get(block=not (written or flushes))
            except queue.Empty:
                self._settle(written, flushes)
                continue
            if isinstance(job, _Write):
                self._persist(partial(atomic.write_bytes, job.path, job.image, sync_name=False))
                written.append(job)
                continue
            flushes.append(job)
            if job.close or len(flushes) == _MAX_SHARED:
                self._settle(written, flushes)
            if job.close:
                return

    def _settle(self, written: list[_Write], flushes: list[_Flush]) -> None:
        """Make the names of what was written durable, then say so."""
        for folder in {job.path.parent for job in written}:
            self._persist(partial(atomic.sync_folder, folder))
        for job in written:
            if job.replaces is not None:
                _remove(job.replaces)
        for flush in flushes:
            flush.done.set()
        written.clear()
        flushes.clear()

    def _submit(self, job: _Write | _Flush) -> None:
        """Hand over to the disk; waits while it is behind, and not for one that has failed."""
        while self._error is None:
            try:
                return self._jobs.put(job, timeout=_POLL_S)
            except queue.Full:
                continue
        raise StoreError("an earlier write has failed")

    def _next_item(self) -> GroupRecord | _Flush | None:
        try:
            return self._queue.get(timeout=MAX_PENDING_S / 4)
        except queue.Empty:
            return None

    def _handle(self, item: GroupRecord | _Flush | None) -> bool:
        """Take one item; True when it was the last."""
        if isinstance(item, _Flush):
            self._flush_pending()
            if item.close:
                self._close_segment()
                self._wait_for_joiner()
            self._submit(item)
            return item.close
        if item is not None:
            self._pending_since = self._pending_since if self._pending else time.monotonic()
            self._pending.append(item)
            self._pending_bytes += _num_bytes(item)
        return False

    def _flush_if_due(self) -> None:
        waited = time.monotonic() - self._pending_since
        if self._pending and (waited > MAX_PENDING_S or self._pending_bytes > self._max_bytes):
            self._flush_pending()

    def _persist(self, write: Callable[[], T]) -> T:
        """Call `write`; what passes (disk full, quota, stale handle) is waited out, not lost."""
        deadline, delay_s = time.monotonic() + self._retry_s, 0.25
        while True:
            try:
                done = write()
                self.trouble = ""
                return done
            except OSError as error:
                self.trouble = str(error)
                left_s = deadline - time.monotonic()
                if error.errno not in _PASSING or left_s <= 0:
                    raise
                log.warning(
                    "rollouts cannot be written (%s); trying again for %.0f s, nothing is lost",
                    error,
                    left_s,
                )
                time.sleep(min(delay_s, left_s))
                delay_s = min(2 * delay_s, _MAX_DELAY_S)

    @property
    def _max_bytes(self) -> int:
        return self._config.segment_mb << 20

    def _flush_pending(self) -> None:
        """Pending groups become a part of the open segment, or a closed one of their own."""
        if not self._pending:
            return
        block = build.from_records(
            self._pending, reward_names=self._reward_names, first_rollout_id=self._next_rollout_id
        )
        if self._is_direct(block):
            self._close_segment()
            number = self._persist(self._claim_segment)
            self._submit_segment(number, self._image(number, block, part=-1))
        else:
            self._submit_part(block)
        self._next_rollout_id += blocks.num_rows(block, "rollouts")
        self._pending.clear()
        self._pending_bytes = 0

    def _is_direct(self, block: Block) -> bool:
        uncompressed = self._config.compression == "none"
        return uncompressed and blocks.num_bytes(block) >= self._max_bytes // DIRECT_SHARE

    def _submit_part(self, block: Block) -> None:
        if self._segment is None:
            self._segment = _OpenSegment(self._persist(self._claim_segment))
            self._persist(partial(atomic.sync_folder, self._folder))
        segment = self._segment
        part = len(segment.blocks)
        path = open_path(self._folder, segment.number) / f"part_{part:06d}.h5"
        image = self._image(segment.number, block, part=part)
        self._submit(_Write(path, image))
        segment.add(block)
        if self._is_full(segment):
            self._close_segment()

    def _is_full(self, segment: _OpenSegment) -> bool:
        return (
            segment.num_rollouts >= self._config.segment_rollouts
            or segment.num_bytes >= self._max_bytes
            or len(segment.blocks) >= MAX_PARTS
        )

    def _claim_segment(self) -> int:
        """A number that no writer has. Making the folder is the claim: only one can."""
        if self._last_number < 0:
            self._last_number = max(segment_numbers(self._folder), default=-1)
        while True:
            self._last_number = number = self._last_number + 1
            opened = open_path(self._folder, number)
            try:
                opened.mkdir()
            except FileExistsError:
                continue
            if not segment_path(self._folder, number).exists():
                return number
            opened.rmdir()

    # ------------------------------------------------------------ closing a segment

    def _close_segment(self) -> None:
        """Have the parts of the open segment joined, beside whatever comes next."""
        segment, self._segment = self._segment, None
        if segment is None:
            return
        self._wait_for_joiner()
        self._joiner = self._start(lambda: self._join(segment), "rollout-joiner")

    def _wait_for_joiner(self) -> None:
        if self._joiner is not None:
            self._joiner.join()  # it ends by itself: what it waits for has deadlines
            self._joiner = None

    def _join(self, segment: _OpenSegment) -> None:
        image = self._image(segment.number, blocks.join(segment.blocks), part=-1, joined=True)
        self._submit_segment(segment.number, image)

    def _image(self, number: int, block: Block, *, part: int, joined: bool = False) -> Image:
        attributes = self._file_attributes(number, block, self._attributes)
        compression = self._closed_compression if joined else "none"
        return encode(block, attributes | {"part": part}, compression=compression)

    @property
    def _closed_compression(self) -> str:
        return "checksum" if self._config.compression == "none" else self._config.compression

    def _submit_segment(self, number: int, image: Image) -> None:
        """A closed segment takes the place of its parts the moment it is named."""
        path = segment_path(self._folder, number)
        self._submit(_Write(path, image, replaces=open_path(self._folder, number)))

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
        parts: list[Block] = []
        attributes: dict[str, Any] = {}
        for path in part_paths(open_path(self._folder, number)):
            file = RolloutFile(path, path.name)
            attributes = file.attributes
            parts.append(_sound_block(file))
            file.close()
        if attributes.get("attempt", 0) >= self._attempt:
            return
        if not parts:  # claimed, and killed before its first flush
            shutil.rmtree(open_path(self._folder, number), ignore_errors=True)
            return
        block = blocks.join(parts)
        attributes = self._file_attributes(number, block, attributes) | {"part": -1}
        image = encode(block, attributes, compression=self._closed_compression)
        atomic.write_bytes(segment_path(self._folder, number), image)
        shutil.rmtree(open_path(self._folder, number), ignore_errors=True)


def _sound_block(file: RolloutFile) -> Block:
    """Raises StoreError for a column that is damaged: it must not get a new checksum."""
    block = file.block()
    if damaged := file.damaged_columns(block):
        raise StoreError(f"the checksum of {damaged[0]} of {file.name} is wrong")
    return block


def _remove(opened: Path) -> None:
    """The folder of a segment that has been closed; empty when it never had parts."""
    try:
        opened.rmdir()
    except OSError:
        shutil.rmtree(opened, ignore_errors=True)


def _num_bytes(record: GroupRecord) -> int:
    """About what a group takes, uncompressed."""
    return 1024 + sum(13 * len(c.token_ids) + len(c.text) + 256 for c in record.completions)
