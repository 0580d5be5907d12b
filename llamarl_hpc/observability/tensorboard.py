"""TensorBoard events, if the `tensorboard` package is installed. Needs neither torch nor TF.

Written here and now, without a thread: what a full disk refuses is left out, and the file stays
readable.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class TensorBoard:
    """Scalars by step; does nothing when switched off or not installed (said once in the log)."""

    def __init__(self, folder: Path, *, enabled: bool = True) -> None:
        self._file = _open(folder) if enabled else None
        self._end = 0  # of the last whole record
        self._warned = False
        if self._file is not None:
            self._write(file_version="brain.Event:2")

    @property
    def is_on(self) -> bool:
        return self._file is not None

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Every finite number of `metrics` at `step`."""
        if self._file is None:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
            if isinstance(value, int | float) and math.isfinite(value)
        ]
        self._write(step=step, summary=Summary(value=values))

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        assert self._file is not None
        record = io.BytesIO()
        event = Event(wall_time=time.time(), **fields)
        RecordWriter(record).write(event.SerializeToString())
        try:
            data = record.getvalue()
            if os.pwrite(self._file, data, self._end) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._end += len(data)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._end)
            if not self._warned:
                log.warning("TensorBoard events are left out for now: %s", error)
            self._warned = True

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _open(folder: Path) -> int | None:
    try:
        import tensorboard.summary.writer.record_writer  # noqa: F401
    except ImportError:
        log.info("no TensorBoard events: the package 'tensorboard' is not installed")
        return None
    folder.mkdir(parents=True, exist_ok=True)
    name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"
    return os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
