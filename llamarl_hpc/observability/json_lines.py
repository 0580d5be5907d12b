"""JSON Lines files that survive a kill: one object a line, each line written at once.

A crash can tear only the last line. The reader passes over it, and whoever opens the file for
appending again first removes it, so that every other JSON reader can read the file too. A disk
that is full does not end the run: lines are kept in memory until it takes them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

log = logging.getLogger(__name__)

_MAX_LINE_BYTES = 1 << 20
_MAX_UNWRITTEN_BYTES = 8 << 20


class JsonLinesFile:
    """Appends objects to a file; may be used from several threads."""

    def __init__(self, path: Path) -> None:
        """Opens (and makes) the file; raises OSError when that cannot be done."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock = threading.Lock()
        self._closed = False
        self._unwritten = bytearray()
        self._path, self._warned = path, False
        self._mend_end()

    def _mend_end(self) -> None:
        size = os.fstat(self._file).st_size
        tail = os.pread(self._file, _MAX_LINE_BYTES, max(0, size - _MAX_LINE_BYTES))
        torn = tail[tail.rfind(b"\n") + 1 :]
        if not torn:
            return
        if _parsed(torn) is None:
            os.ftruncate(self._file, size - len(torn))
        else:  # whole but for its end
            os.write(self._file, b"\n")

    def append(self, values: Mapping[str, object]) -> None:
        """One line; numbers that JSON lacks (NaN, infinity) become null."""
        line = json.dumps(_plain(values), allow_nan=False, separators=(",", ":")) + "\n"
        with self._lock:
            if not self._closed and len(self._unwritten) < _MAX_UNWRITTEN_BYTES:
                self._unwritten += line.encode()
                self._write()

    def _write(self) -> None:
        try:
            while self._unwritten:
                del self._unwritten[: os.write(self._file, self._unwritten)]
        except OSError as error:
            if not self._warned:
                log.warning("%s cannot be written, lines are kept for now: %s", self._path, error)
            self._warned = True

    def close(self) -> None:
        """Idempotent; what is appended afterwards is left out."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._write()
                os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a file, in order; empty when there is no file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    rows = (_parsed(line) for line in data.split(b"\n"))
    return [row for row in rows if row is not None]


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The object in a line; None when it is torn, empty or something else."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _plain(value: object) -> object:
    """What the json module can write strictly: numpy scalars as numbers, NaN as None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, bool | str | int) or value is None:
        return value
    item = getattr(value, "item", None)
    if callable(item):
        value = item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, bool | int) else str(value)
