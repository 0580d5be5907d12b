"""Files that appear whole or not at all: written beside, synced, renamed over, folder synced.

A reader on any node sees the old content or the new, never a part; a crash leaves at most a file
named `.<name>.<something>.tmp`, which nothing reads.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import count
from pathlib import Path

Buffer = bytes | bytearray | memoryview
_MAX_BUFFERS = 512  # of one call
_numbers = count()  # of the files that a process writes


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` (UTF-8). Raises the `OSError` of the file system; then `path` is
    as it was."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: object) -> None:
    """Replace `path` by `value` as JSON, one line per key, strict (no NaN)."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_bytes(path: Path, data: Buffer | Sequence[Buffer]) -> None:
    """Replace `path` by `data` (several buffers: end to end)."""
    beside = write_beside(path, data)
    try:
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_beside(path: Path, data: Buffer | Sequence[Buffer]) -> Path:
    """`data`, durable, in a file beside `path` that nothing reads. It is the caller's to rename
    over `path` (and to sync the folder then), or to remove. When this raises there is none."""
    beside = path.with_name(f".{path.name}.{os.getpid()}-{_process_token()}-{next(_numbers)}.tmp")
    try:
        _write_durably(beside, [data] if isinstance(data, Buffer) else data)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return beside


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


@cache
def _process_token() -> str:
    """Tells apart processes with one id on several nodes."""
    return secrets.token_hex(3)


def _write_durably(path: Path, buffers: Sequence[Buffer]) -> None:
    # Few system calls: after each of them a thread waits for Python's lock.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        _write_all(descriptor, buffers)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, buffers: Sequence[Buffer]) -> None:
    views = [view for view in (memoryview(buffer).cast("B") for buffer in buffers) if view]
    first = 0
    while first < len(views):  # one call takes at most 1,024 buffers and 2 GiB, and may take less
        written = os.writev(descriptor, views[first : first + _MAX_BUFFERS])
        while first < len(views) and written >= len(views[first]):
            written -= len(views[first])
            first += 1
        if written:
            views[first] = views[first][written:]
