"""The rollout writer's manners: full disks, slow disks, closing."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from make_records import make_record
from store_checks import check_equal, open_writer, write

from llamarl_hpc.errors import StoreError
from llamarl_hpc.storage import atomic
from llamarl_hpc.storage.rollout_store import disk
from llamarl_hpc.storage.rollout_store import writer as writing
from llamarl_hpc.storage.rollout_store.reader import RolloutReader
from llamarl_hpc.storage.rollout_store.writer import RolloutWriter


def test_close_twice_is_fine_and_appending_after_it_is_not(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    writer.append(make_record(0))
    writer.close()
    writer.close()
    with pytest.raises(StoreError, match="the rollout writer is closed"):
        writer.append(make_record(1))
    assert RolloutReader(tmp_path).num_rows("groups") == 1


def test_a_disk_that_is_full_or_away_is_waited_out_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_beside, failures = atomic.write_beside, sorted(disk.PASSING)

    def sometimes_full(path: Path, data: Any) -> Path:
        if failures:
            code = failures.pop()
            raise OSError(code, os.strerror(code))
        return write_beside(path, data)

    monkeypatch.setattr(atomic, "write_beside", sometimes_full)
    monkeypatch.setattr(disk, "MAX_DELAY_S", 0.01)
    monkeypatch.setattr(disk, "FIRST_DELAY_S", 0.01)
    records = [make_record(i) for i in range(3)]
    with caplog.at_level(logging.WARNING):
        write(tmp_path, records, flush_every=1)
    check_equal(RolloutReader(tmp_path), records)
    assert sum("nothing is lost" in message for message in caplog.messages) == 8


def test_a_writer_says_that_it_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_beside, is_full = atomic.write_beside, threading.Event()
    is_full.set()

    def full(path: Path, data: Any) -> Path:
        if is_full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_beside(path, data)

    monkeypatch.setattr(atomic, "write_beside", full)
    writer = open_writer(tmp_path)
    assert writer.trouble == ""
    writer.append(make_record(0))
    writer.flush(wait=False)
    deadline = time.monotonic() + 30
    while not writer.trouble and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "No space left" in writer.trouble and not writer.has_failed
    is_full.clear()
    writer.close()
    assert writer.trouble == "" and RolloutReader(tmp_path).num_rows("groups") == 1


def test_a_thread_that_gets_through_does_not_hide_what_another_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "MAX_DELAY_S", 0.01)
    is_full = threading.Event()
    is_full.set()

    def write_if_there_is_space() -> None:
        if is_full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")

    drive = disk.Disk(tmp_path, retry_s=60)
    waiting = drive.start(lambda: drive.persist(write_if_there_is_space), "joiner")
    deadline = time.monotonic() + 30
    while not drive.trouble and time.monotonic() < deadline:
        time.sleep(0.01)
    drive.persist(lambda: None)
    assert "No space left" in drive.trouble
    is_full.clear()
    waiting.join(30)
    assert drive.trouble == "" and drive.error is None
    drive.submit(disk.Flush(threading.Event(), close=True))
    drive.join(30)


def test_an_error_that_stays_is_raised_to_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, data: Any) -> Path:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(atomic, "write_beside", refused)
    writer = open_writer(tmp_path)
    writer.append(make_record(0))
    with pytest.raises(StoreError, match=r"cannot be written to .*: .*Permission denied"):
        writer.flush(30)
    with pytest.raises(StoreError, match="Permission denied"):
        writer.append(make_record(1))
    with pytest.raises(StoreError, match="Permission denied"):
        writer.close()


def test_a_slow_disk_pushes_back_and_the_deadline_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(writing, "QUEUE_RECORDS", 2)
    monkeypatch.setattr(RolloutWriter, "_close_leftovers", lambda self: gate.wait(20))
    writer = open_writer(tmp_path)
    writer.append(make_record(0))
    writer.append(make_record(1))
    with pytest.raises(StoreError, match=f"has taken nothing for 0 s .*{tmp_path.name}"):
        writer.append(make_record(2), timeout_s=0.3)
    gate.set()
    writer.close()
    assert RolloutReader(tmp_path).num_rows("groups") == 2


def test_groups_reach_the_disk_in_time_even_if_nobody_flushes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "MAX_PENDING_S", 0.2)
    writer = open_writer(tmp_path)
    writer.append(make_record(0))
    deadline = time.monotonic() + 20
    while RolloutReader(tmp_path).num_rows("groups") == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert RolloutReader(tmp_path).num_rows("groups") == 1
    writer.close()


def test_importing_the_reader_imports_nothing_heavy() -> None:
    code = (
        "import sys, llamarl_hpc.storage.rollout_store.reader;"
        "print({'h5py', 'torch', 'pandas', 'pydantic'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_a_file_that_is_written_sooner_waits_for_the_names_before_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_beside, first, others = atomic.write_beside, threading.Event(), list[str]()

    def slow_at_first(path: Path, data: Any) -> Path:
        beside = write_beside(path, data)
        if path.name == "part_000000.h5":
            assert first.wait(60)
        else:
            others.append(path.name)
        return beside

    monkeypatch.setattr(atomic, "write_beside", slow_at_first)
    writer = open_writer(tmp_path)
    for number in range(3):
        writer.append(make_record(number))
        writer.flush(wait=False)
    deadline = time.monotonic() + 60
    while len(others) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert sorted(others) == ["part_000001.h5", "part_000002.h5"]  # durable, beside the first
    assert not list(tmp_path.rglob("*.h5")) and RolloutReader(tmp_path).num_rows("groups") == 0
    first.set()
    writer.flush(60)
    assert RolloutReader(tmp_path).column("groups/group_id").tolist() == [0, 1, 2]
    writer.close()


def test_when_one_file_fails_for_good_none_after_it_is_named_or_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_beside, others = atomic.write_beside, threading.Event()

    def fails_at_last(path: Path, data: Any) -> Path:
        if path.name == "part_000001.h5":
            assert others.wait(60)
            raise PermissionError(errno.EACCES, "Permission denied")
        beside = write_beside(path, data)
        if path.name == "part_000002.h5":
            others.set()
        return beside

    monkeypatch.setattr(atomic, "write_beside", fails_at_last)
    writer = open_writer(tmp_path)
    for number in range(3):
        writer.append(make_record(number))
        writer.flush(wait=False)
    with pytest.raises(StoreError, match="Permission denied"):
        writer.flush(60)
    deadline = time.monotonic() + 60
    while list(tmp_path.rglob(".*.tmp")) and time.monotonic() < deadline:
        time.sleep(0.01)
    names = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert names == ["part_000000.h5"]


def test_a_disk_with_room_for_one_more_takes_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(disk, "MAX_DELAY_S", 0.01)
    room, together = threading.Lock(), threading.Barrier(2)
    tries: dict[str, int] = {}

    def write_where_one_fits() -> None:
        me = threading.current_thread().name
        tries[me] = tries.get(me, 0) + 1
        if tries[me] == 1:
            together.wait(60)
        elif room.acquire(blocking=False):
            time.sleep(0.2)
            return room.release()
        raise OSError(errno.ENOSPC, "No space left on device")

    drive = disk.Disk(tmp_path, retry_s=60)
    threads = [
        drive.start(lambda: drive.persist(write_where_one_fits), name) for name in ("a", "b")
    ]
    for thread in threads:
        thread.join(60)
    assert tries == {"a": 2, "b": 2}  # the second time each had the disk for itself
    drive.submit(disk.Flush(threading.Event(), close=True))
    drive.join(30)
