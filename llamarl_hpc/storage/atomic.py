"""Files that appear whole or not at all: written beside, synced, renamed over, folder synced.

A reader on any node sees the old content or the new, never a part; a crash leaves at most a file
named `.<name>.<something>.tmp`, which nothing reads.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path

Buffer = bytes | bytearray | memoryview


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` (UTF-8). Raises the `OSError` of the file system; then `path` is
    as it was."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: object) -> None:
    """Replace `path` by `value` as JSON, one line per key, strict (no NaN)."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_bytes(
    path: Path, data: Buffer, *, before_rename: Callable[[], None] | None = None
) -> None:
    """Replace `path` by `data`. `before_rename` is called when the data is on disk, just before it
    takes the name; if it raises, nothing has changed."""
    beside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(3)}.tmp")
    try:
        with open(beside, "wb", buffering=0) as file:
            _write_all(file.fileno(), memoryview(data))
            os.fsync(file.fileno())
        if before_rename is not None:
            before_rename()
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable (new files, renames, removals)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_files(paths: Iterable[Path]) -> None:
    """Make files durable that another process has written and closed."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Delete what a crashed writer left half-written; only for the folder's one live writer."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def _write_all(descriptor: int, data: memoryview) -> None:
    data = data.cast("B")
    while data:  # one write(2) takes at most 2 GiB, and may take less
        data = data[os.write(descriptor, data) :]
