"""The file in /dev/shm that shared-memory weight sync works on: two slots, a table of readers.

    header     magic, rows in use | per slot: version, serial, verdict, judge | per reader: version
               taken, rank, executor
    slot 0     one arena (weight_sync/plan.py)
    slot 1     one arena
    sums       per slot: for every trainer rank the serial that it has copied, and summed, then a
               sum for every piece of the plan

A serial counts what was written into a slot. The verdict (serial, 0 or the number of the first bad
piece + 1) is left by the reader that has compared the sums: all readers look at the same memory.

The kernel keeps the peace: every claim is a lock on a byte of the file (an open file description
lock), which vanishes with its process, however that dies. So a dead reader never blocks the
trainer, and a dead trainer's file is known as such and removed by the next one.

    OWNER       held by the trainer's leader as long as the file is in use
    ALIVE + i   held by the reader that owns row i of the table
    JUDGE + s   held by the reader that compares the sums of slot s
    slot s      one byte per reader, held while it reads; all of them, held by the writer
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np

from llamarl_hpc.errors import ConfigError, WeightSyncError
from llamarl_hpc.types import Array

SHM = Path("/dev/shm")
NUM_SLOTS = 2
MAX_READERS = 480
HEADER_BYTES = 1 << 16

_PREFIX = f"llamarl-{os.getuid()}-"
_MAGIC = 0x4C52_4C57_0000_0002  # format 2
_SLOT_FIELDS = 8  # int64 at 64 + slot * 64
_READER_AT, _READER_BYTES, _NAME_BYTES = 4096, 128, 96
_OWNER, _JUDGE, _ALIVE, _SLOT = 0, 100, 1000, 2000
_FLOCK = "@hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What the size of a file follows from."""

    num_bytes: int  # of an arena
    num_ranks: int  # of the trainer
    num_pieces: int  # of the plan

    @property
    def sums_bytes(self) -> int:
        return _slot_bytes(8 * NUM_SLOTS * (2 * self.num_ranks + self.num_pieces))

    @property
    def sums_at(self) -> int:
        return HEADER_BYTES + NUM_SLOTS * _slot_bytes(self.num_bytes)

    @property
    def file_bytes(self) -> int:
        return self.sums_at + self.sums_bytes


class Segment:
    """One process's view of the file. The owner writes, readers map slots copy-on-write."""

    def __init__(self, handle: int, path: Path, shape: Shape, *, owner: bool) -> None:
        self.path = path
        self._handle: int | None = handle
        self._owner = owner
        self._slot_bytes = _slot_bytes(shape.num_bytes)
        self._num_ranks = shape.num_ranks
        size = shape.file_bytes
        if os.fstat(handle).st_size != size:
            raise WeightSyncError(f"{path} is not {size} bytes large as the weights need")
        self._header = mmap.mmap(handle, HEADER_BYTES)
        self._words: Array = np.frombuffer(self._header, dtype=np.int64)
        self._sums: Array = _map_sums(handle, shape)  # int64 [NUM_SLOTS, 2 * ranks + pieces]
        self._row: int | None = None
        if owner:
            self._words[0] = _MAGIC
            for slot in range(NUM_SLOTS):
                self.set_version(slot, -1)
        elif self._words[0] != _MAGIC:
            raise WeightSyncError(f"{path} was written by another version of llamarl_hpc")

    # ------------------------------------------------------------------ making and finding

    @classmethod
    def create(cls, shape: Shape) -> Segment:
        """A new file. It gets its name only once it is ours and whole,
        so nobody ever sees half of one. Raises ConfigError when memory does not suffice."""
        if problem := shortage(shape.num_bytes):
            raise ConfigError(problem)
        path = SHM / f"{_PREFIX}{secrets.token_hex(8)}"
        handle = os.open(SHM, os.O_TMPFILE | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(
                handle, 0, shape.file_bytes
            )  # now, or a later write dies with SIGBUS
            assert _lock(handle, _OWNER, 1)
            segment = cls(handle, path, shape, owner=True)
            folder = os.open(SHM, os.O_RDONLY)
            try:
                os.link(f"/proc/self/fd/{handle}", path, src_dir_fd=folder, follow_symlinks=True)
            finally:
                os.close(folder)
        except OSError as error:
            os.close(handle)
            if error.errno == errno.ENOSPC:
                raise ConfigError(_shortage_text(shape.num_bytes)) from error
            raise
        return segment

    @classmethod
    def attach(cls, path: Path, shape: Shape) -> Segment:
        """Raises FileNotFoundError, or WeightSyncError when the file is another's."""
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(handle, path, shape, owner=False)
        except BaseException:
            os.close(handle)
            raise

    def is_owned(self) -> bool:
        """Whether the trainer that made it still lives."""
        return _holder(self._fd, _OWNER, 1) is not None

    def close(self) -> None:
        """Give up all claims; the owner removes the file. Mapped memory stays while referenced."""
        if self._handle is not None:
            if self._owner:
                self.path.unlink(missing_ok=True)
            _unlock(self._handle, 0, 0)  # all; mapped memory keeps a duplicate of the handle
            os.close(self._handle)
            self._handle = None

    # ------------------------------------------------------------------ slots

    def map_slot(self, slot: int, *, writable: bool) -> mmap.mmap:
        """Shared memory for the trainer, its page tables filled now and not by the first version;
        for readers private pages, so that nothing a reader does can reach the others."""
        offset = HEADER_BYTES + slot * self._slot_bytes
        if not writable:
            return mmap.mmap(self._fd, self._slot_bytes, access=mmap.ACCESS_COPY, offset=offset)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return mmap.mmap(self._fd, self._slot_bytes, flags=flags, offset=offset)

    def version(self, slot: int) -> int:
        """-1 while nothing complete is in it."""
        return int(self._words[_SLOT_FIELDS * (1 + slot)])

    def set_version(self, slot: int, version: int, serial: int = 0) -> None:
        at = _SLOT_FIELDS * (1 + slot)
        self._words[at + 1] = serial
        self._words[at] = version

    def serial(self, slot: int) -> int:
        return int(self._words[_SLOT_FIELDS * (1 + slot) + 1])

    def lock_for_writing(self, slot: int) -> bool:
        return _lock(self._fd, _slot_lock(slot), MAX_READERS)

    def unlock_for_writing(self, slot: int) -> None:
        _unlock(self._fd, _slot_lock(slot), MAX_READERS)

    def lock_for_reading(self, slot: int) -> bool:
        assert self._row is not None
        return _lock(self._fd, _slot_lock(slot) + self._row, 1)

    def unlock_for_reading(self, slot: int) -> None:
        assert self._row is not None
        if self._handle is not None:
            _unlock(self._handle, _slot_lock(slot) + self._row, 1)

    # ------------------------------------------------------------------ what is done

    def set_copied(self, slot: int, rank: int, serial: int) -> None:
        """Trainer rank `rank` has written all its pieces."""
        self._sums[slot, rank] = serial

    def is_copied(self, slot: int, rank: int, serial: int) -> bool:
        return int(self._sums[slot, rank]) == serial

    def set_sums(self, slot: int, rank: int, serial: int, sums: Mapping[int, int]) -> None:
        """What trainer rank `rank` found: number of the piece -> sum, modulo 2^64."""
        for number, value in sums.items():
            self._sums[slot, 2 * self._num_ranks + number] = np.uint64(value).astype(np.int64)
        self._sums[slot, self._num_ranks + rank] = serial

    def is_summed(self, slot: int, rank: int, serial: int) -> bool:
        return int(self._sums[slot, self._num_ranks + rank]) == serial

    def sums(self, slot: int) -> list[int]:
        """Of every piece, in the order of the plan."""
        return [int(v) for v in self._sums[slot, 2 * self._num_ranks :].astype(np.uint64)]

    def lock_to_judge(self, slot: int) -> bool:
        assert self._row is not None
        locked = _lock(self._fd, _JUDGE + slot, 1)
        if locked:
            self._words[_SLOT_FIELDS * (1 + slot) + 4] = self._row
        return locked

    def judge(self, slot: int) -> str:
        """The reader that compared the sums of the slot last, or does so now."""
        _, rank, executor = self._reader(int(self._words[_SLOT_FIELDS * (1 + slot) + 4]))
        return f"{executor} rank {rank}"

    def unlock_to_judge(self, slot: int) -> None:
        if self._handle is not None:
            _unlock(self._handle, _JUDGE + slot, 1)

    def verdict(self, slot: int, serial: int) -> int | None:
        """0: good; k + 1: piece k is not what was announced; None: nobody has compared yet."""
        at = _SLOT_FIELDS * (1 + slot)
        return int(self._words[at + 3]) if int(self._words[at + 2]) == serial else None

    def set_verdict(self, slot: int, serial: int, verdict: int) -> None:
        at = _SLOT_FIELDS * (1 + slot)
        self._words[at + 3] = verdict
        self._words[at + 2] = serial

    # ------------------------------------------------------------------ readers

    def register(self, executor: str, rank: int) -> None:
        """Take a free row of the table, ours until this process ends or closes."""
        for row in range(MAX_READERS):
            if _lock(self._fd, _ALIVE + row, 1):
                name = executor.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
                at = _READER_AT + row * _READER_BYTES
                struct.pack_into(f"@qq{_NAME_BYTES}s", self._header, at, -1, rank, name)
                self._row = row
                self._words[1] = max(int(self._words[1]), row + 1)
                return
        raise WeightSyncError(f"more than {MAX_READERS} processes read {self.path}")

    def set_taken(self, version: int) -> None:
        """This reader needs no version older than `version` any more, but for what it reads."""
        assert self._row is not None
        self._words[(_READER_AT + self._row * _READER_BYTES) // 8] = version

    def slow_readers(self, slot: int, executors: set[str]) -> Iterator[str]:
        """Living readers that read the slot, or belong to `executors` and still have to."""
        for row in range(int(self._words[1])):
            if _holder(self._fd, _ALIVE + row, 1) is None:
                continue
            taken, rank, executor = self._reader(row)
            reads = _holder(self._fd, _slot_lock(slot) + row, 1) is not None
            if reads or (executor in executors and taken < self.version(slot)):
                yield f"{executor} rank {rank}"

    def _reader(self, row: int) -> tuple[int, int, str]:
        """Version taken, rank, executor."""
        at = _READER_AT + row * _READER_BYTES
        taken, rank, name = struct.unpack_from(f"@qq{_NAME_BYTES}s", self._header, at)
        return taken, rank, name.rstrip(b"\0").decode(errors="replace")

    @property
    def _fd(self) -> int:
        if self._handle is None:
            raise WeightSyncError(f"{self.path} is closed")
        return self._handle


def shortage(num_bytes: int) -> str | None:
    """Why weights of `num_bytes` cannot go through shared memory here; None if they can."""
    if not SHM.is_dir():
        return f"there is no {SHM} on this machine; set weight_sync.transport: collective"
    stats = os.statvfs(SHM)
    if stats.f_bavail * stats.f_frsize < HEADER_BYTES + NUM_SLOTS * _slot_bytes(num_bytes):
        return _shortage_text(num_bytes)
    return None


def remove_stale() -> list[Path]:
    """Remove this user's files whose trainer is gone (killed before it could close); returns them.

    Safe at any time, beside other runs: a living trainer's file is locked.
    """
    removed = []
    for path in SHM.glob(f"{_PREFIX}*"):
        try:
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # another user's, or gone already
            continue
        try:
            if _holder(handle, _OWNER, 1) is None:
                path.unlink(missing_ok=True)
                removed.append(path)
        finally:
            os.close(handle)
    return removed


def _shortage_text(num_bytes: int) -> str:
    stats = os.statvfs(SHM)
    free, need = stats.f_bavail * stats.f_frsize >> 20, (NUM_SLOTS * num_bytes >> 20) + 1
    return (
        f"{SHM} has {free:,} MiB free but two copies of the weights need {need:,} MiB; enlarge it "
        f"(mount -o remount,size={need + 1024}m {SHM}, or docker run --shm-size) or set "
        "weight_sync.transport: collective"
    )


def _map_sums(handle: int, shape: Shape) -> Array:
    memory = mmap.mmap(handle, shape.sums_bytes, offset=shape.sums_at)
    row = 2 * shape.num_ranks + shape.num_pieces
    words: Array = np.frombuffer(memory, dtype=np.int64, count=NUM_SLOTS * row)
    return words.reshape(NUM_SLOTS, row)


def _slot_bytes(num_bytes: int) -> int:
    return max(-(-num_bytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE


def _slot_lock(slot: int) -> int:
    return _SLOT + slot * 1000


def _lock(handle: int, start: int, length: int) -> bool:
    try:
        _fcntl(handle, fcntl.F_OFD_SETLK, fcntl.F_WRLCK, start, length)
    except BlockingIOError:
        return False
    return True


def _unlock(handle: int, start: int, length: int) -> None:
    _fcntl(handle, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, start, length)


def _holder(handle: int, start: int, length: int) -> int | None:
    """First byte in the range that another has locked, None if there is none."""
    kind, first = _fcntl(handle, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, start, length)
    return None if kind == fcntl.F_UNLCK else first


def _fcntl(handle: int, command: int, kind: int, start: int, length: int) -> tuple[int, int]:
    request = struct.pack(_FLOCK, kind, os.SEEK_SET, start, length, 0)
    answer = struct.unpack(_FLOCK, fcntl.fcntl(handle, command, request))
    return answer[0], answer[2]
