"""Writing a run's rollouts: bounded queues, a few threads, files that appear whole.

    controller --append--> queue --> rollout-writer: pending groups --flush--> image of a file
        image --> queue --> rollout-disk: a part of the open segment, or a segment of its own
        parts of a full segment --> rollout-joiner: image of a closed one --> rollout-disk

Who waits for whom: `append` waits only while the queue is full, `flush` and `close` until the
disk has everything before them; each with a deadline. The writer waits for the disk (at most four
images have no name yet) and for the joiner (one segment at a time); the disk for the file system.
Why a kill cannot hurt what is on disk: see the package.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from llamarl_hpc.errors import StoreError
from llamarl_hpc.storage import atomic
from llamarl_hpc.storage.records import GroupRecord
from llamarl_hpc.storage.rollout_store import blocks, build
from llamarl_hpc.storage.rollout_store.disk import POLL_S, Disk, Flush, Write
from llamarl_hpc.storage.rollout_store.encode import Attributes, Image
from llamarl_hpc.storage.rollout_store.filters import check_available
from llamarl_hpc.storage.rollout_store.layout import Block
from llamarl_hpc.storage.rollout_store.leftovers import close_leftovers
from llamarl_hpc.storage.rollout_store.names import open_path, part_path, segment_path
from llamarl_hpc.storage.rollout_store.segment import (
    OpenSegment,
    claim,
    closed_image,
    is_direct,
    joined_compression,
    max_bytes,
    part_image,
)

if TYPE_CHECKING:
    from llamarl_hpc.config.schema import StorageConfig

MAX_PENDING_S = 30.0  # unflushed groups are written after so long even if nobody asks
QUEUE_RECORDS = 4096
RETRY_S = 600.0  # for how long a full disk is waited out


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
        self._pending: list[GroupRecord] = []
        self._pending_bytes = 0
        self._pending_since = 0.0
        self._next_rollout_id = attempt << 32
        self._segment: OpenSegment | None = None
        self._last_number = -1  # segments up to this one are taken
        self._closed = False
        self._queue: queue.Queue[GroupRecord | Flush] = queue.Queue(QUEUE_RECORDS)
        self._joiner: threading.Thread | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._disk = Disk(folder, retry_s=retry_s)
        self._thread = self._disk.start(self._run, "rollout-writer")

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
        request = Flush(threading.Event())
        if wait:
            self._wait(request, timeout_s)
        else:
            self._put(request, timeout_s)

    def close(self, timeout_s: float = RETRY_S) -> None:
        """Flush, close the segment, end the thread. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._disk.raise_error()
        self._wait(Flush(threading.Event(), close=True), timeout_s)
        self._thread.join(timeout_s)
        self._disk.join(timeout_s)

    @property
    def trouble(self) -> str:
        """Why nothing can be written just now; empty when all is well."""
        return self._disk.trouble

    @property
    def has_failed(self) -> bool:
        """It has given up; the next call says why."""
        return self._disk.error is not None

    def _check(self) -> None:
        self._disk.raise_error()
        if self._closed:
            raise StoreError("the rollout writer is closed")

    def _put(self, item: GroupRecord | Flush, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._queue.put(item, timeout=POLL_S)
            except queue.Full:
                self._disk.raise_error()
                if time.monotonic() > deadline:
                    raise StoreError(
                        f"the rollout writer has taken nothing for {timeout_s:.0f} s (folder "
                        f"{self._folder}); is the file system answering?"
                    ) from None

    def _wait(self, request: Flush, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self._put(request, timeout_s)
        while not request.done.wait(POLL_S):
            self._disk.raise_error()
            if time.monotonic() > deadline:
                raise StoreError(
                    f"rollouts were not on disk after {timeout_s:.0f} s (folder {self._folder})"
                )
        self._disk.raise_error()

    # ------------------------------------------------------------ its own thread

    def _run(self) -> None:
        self._disk.persist(self._close_leftovers)
        while not self._handle(self._next_item()):
            self._flush_if_due()

    def _close_leftovers(self) -> None:
        close_leftovers(self._folder, attempt=self._attempt, config=self._config)

    def _next_item(self) -> GroupRecord | Flush | None:
        try:
            return self._queue.get(timeout=MAX_PENDING_S / 4)
        except queue.Empty:
            return None

    def _handle(self, item: GroupRecord | Flush | None) -> bool:
        """Take one item; True when it was the last."""
        if isinstance(item, Flush):
            self._flush_pending()
            if item.close:
                self._close_segment()
                self._wait_for_joiner()
            self._disk.submit(item)
            return item.close
        if item is not None:
            self._pending_since = self._pending_since if self._pending else time.monotonic()
            self._pending.append(item)
            self._pending_bytes += _num_bytes(item)
        return False

    def _flush_if_due(self) -> None:
        waited_s = time.monotonic() - self._pending_since
        large = self._pending_bytes > max_bytes(self._config)
        if self._pending and (waited_s > MAX_PENDING_S or large):
            self._flush_pending()

    def _flush_pending(self) -> None:
        """Pending groups become a part of the open segment, or a closed one of their own."""
        if not self._pending:
            return
        block = build.from_records(
            self._pending, reward_names=self._reward_names, first_rollout_id=self._next_rollout_id
        )
        if is_direct(block, self._config):
            self._close_segment()
            number = self._claim()
            image = closed_image(number, block, self._attributes, "none")
            self._submit_closed(number, image)
        else:
            self._submit_part(block)
        self._next_rollout_id += blocks.num_rows(block, "rollouts")
        self._pending.clear()
        self._pending_bytes = 0

    def _submit_part(self, block: Block) -> None:
        if self._segment is None:
            self._segment = OpenSegment(self._claim())
            self._disk.persist(partial(atomic.sync_folder, self._folder))
        segment = self._segment
        path = part_path(open_path(self._folder, segment.number), len(segment.blocks))
        self._disk.submit(Write(path, part_image(segment, block, self._attributes)))
        segment.add(block)
        if segment.is_full(self._config):
            self._close_segment()

    def _claim(self) -> int:
        claimed = self._disk.persist(partial(claim, self._folder, self._last_number))
        self._last_number = claimed
        return claimed

    # ------------------------------------------------------------ closing a segment

    def _close_segment(self) -> None:
        """Have the parts of the open segment joined, beside whatever comes next."""
        segment, self._segment = self._segment, None
        if segment is None:
            return
        self._wait_for_joiner()
        self._joiner = self._disk.start(partial(self._join, segment), "rollout-joiner")

    def _wait_for_joiner(self) -> None:
        if self._joiner is not None:
            self._joiner.join()  # it ends by itself: what it waits for has deadlines
            self._joiner = None

    def _join(self, segment: OpenSegment) -> None:
        block = blocks.join(segment.blocks)
        compression = joined_compression(self._config)
        image = closed_image(segment.number, block, self._attributes, compression)
        self._submit_closed(segment.number, image)

    def _submit_closed(self, number: int, image: Image) -> None:
        """A closed segment takes the place of its parts the moment it is named."""
        path = segment_path(self._folder, number)
        self._disk.submit(Write(path, image, replaces=open_path(self._folder, number)))


def _num_bytes(record: GroupRecord) -> int:
    """About what a group takes, uncompressed."""
    return 1024 + sum(13 * len(c.token_ids) + len(c.text) + 256 for c in record.completions)
