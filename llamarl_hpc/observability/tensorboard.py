"""TensorBoard events, if the `tensorboard` package is installed. Needs neither torch nor TF."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class TensorBoard:
    """Scalars by step; does nothing when switched off or not installed (said once in the log)."""

    def __init__(self, folder: Path, *, enabled: bool = True) -> None:
        self._writer = _open(folder) if enabled else None

    @property
    def is_on(self) -> bool:
        return self._writer is not None

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Every finite number of `metrics` at `step`."""
        if self._writer is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
            if isinstance(value, int | float) and math.isfinite(value)
        ]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        """Idempotent."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _open(folder: Path) -> Any:
    try:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        log.info("no TensorBoard events: the package 'tensorboard' is not installed")
        return None
    folder.mkdir(parents=True, exist_ok=True)
    return EventFileWriter(str(folder))
