"""Segments, attempts, and what damage does to a folder of them."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import h5py
import pytest
from make_records import make_record
from store_checks import check_equal, open_writer, wait_for_names, write

from llamarl_hpc.storage.rollout_store import segment
from llamarl_hpc.storage.rollout_store.file import RolloutFile
from llamarl_hpc.storage.rollout_store.names import open_path, segment_numbers, segment_path
from llamarl_hpc.storage.rollout_store.reader import RolloutReader
from llamarl_hpc.storage.rollout_store.writer import RolloutWriter


def test_segments_close_by_rollouts_by_size_and_by_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [make_record(i) for i in range(60)]
    write(tmp_path / "rows", records, flush_every=5, segment_rollouts=40)
    assert len(os.listdir(tmp_path / "rows")) == 6
    monkeypatch.setattr(segment, "MAX_PARTS", 3)
    write(tmp_path / "parts", records, flush_every=5)
    assert len(os.listdir(tmp_path / "parts")) == 4
    monkeypatch.setattr(segment, "max_bytes", lambda config: 30_000)
    write(tmp_path / "size", records, flush_every=5)
    assert 1 < len(os.listdir(tmp_path / "size")) < 12
    for name in ("rows", "parts", "size"):
        check_equal(RolloutReader(tmp_path / name), records)


def test_a_new_attempt_starts_a_new_segment_and_closes_what_the_old_left(tmp_path: Path) -> None:
    first = open_writer(tmp_path, attempt=1)
    first.append(make_record(0))
    first.flush(30)
    (tmp_path / "segment_000000.open" / ".part_000001.h5.17.tmp").write_text("torn")
    (tmp_path / ".segment_000000.h5.17.tmp").write_text("torn")
    # the first writer is killed here: it is not closed
    with open_writer(tmp_path, attempt=2) as second:
        second.append(make_record(1, attempt=2))
    assert sorted(os.listdir(tmp_path)) == ["segment_000000.h5", "segment_000001.h5"]
    reader = RolloutReader(tmp_path)
    assert reader.column("groups/attempt").tolist() == [1, 2]
    assert [file.attributes["attempt"] for _, file in reader.scan()] == [1, 2]
    ids = reader.column("rollouts/rollout_id").tolist()
    assert ids == [(1 << 32) + i for i in range(4)] + [(2 << 32) + i for i in range(4)]
    assert reader.find_rollout((2 << 32) + 1) == 5
    with pytest.raises(KeyError, match="no rollout 17"):
        reader.find_rollout(17)


def test_writers_that_start_together_never_share_a_segment(tmp_path: Path) -> None:
    writers = [open_writer(tmp_path) for _ in range(4)]
    for writer in writers:
        writer.flush(30)  # all have looked at what earlier attempts left

    def work(writer: RolloutWriter, base: int) -> None:
        for i in range(5):
            writer.append(make_record(base + i))
            writer.flush(30)
        writer.close()

    threads = [threading.Thread(target=work, args=(w, 100 * i)) for i, w in enumerate(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids = RolloutReader(tmp_path).column("groups/group_id").tolist()
    assert sorted(ids) == [100 * w + i for w in range(4) for i in range(5)]
    assert len(os.listdir(tmp_path)) == 4


def test_a_segment_that_is_closed_while_the_folder_is_listed_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, [make_record(0)])
    closed, opened = segment_path(tmp_path, 0), open_path(tmp_path, 0)
    closed.rename(tmp_path / "hidden")
    opened.mkdir()
    glob, looks = Path.glob, []

    def closing_between(self: Path, pattern: str) -> Any:
        found = list(glob(self, pattern))
        looks.append(pattern)
        if len(looks) == 1:  # the writer closes the segment between the two looks
            (tmp_path / "hidden").rename(closed)
            opened.rmdir()
        return found

    monkeypatch.setattr(Path, "glob", closing_between)
    assert segment_numbers(tmp_path) == {0: True}


def test_a_damaged_segment_is_left_out_and_named(tmp_path: Path) -> None:
    write(tmp_path, [make_record(i) for i in range(30)], flush_every=10, segment_rollouts=40)
    middle = tmp_path / "segment_000001.h5"
    middle.write_bytes(middle.read_bytes()[:1000])
    reader = RolloutReader(tmp_path)
    assert len(reader.problems) == 1 and "segment_000001.h5 cannot be opened" in reader.problems[0]
    assert reader.column("groups/group_id").tolist() == [*range(10), *range(20, 30)]


def test_a_part_that_the_disk_refuses_is_left_out_and_named(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    for i in range(3):
        writer.append(make_record(i))
        writer.flush(30)
    part = tmp_path / "segment_000000.open" / "part_000001.h5"
    part.unlink()
    part.mkdir()
    reader = RolloutReader(tmp_path)
    assert len(reader.problems) == 1 and reader.problems[0].endswith("; 4 rollouts are missing")
    assert "segment_000000.open/part_000001.h5 cannot be opened" in reader.problems[0]
    assert reader.column("groups/group_id").tolist() == [0, 2]
    part.rmdir()
    writer.close()


def test_files_with_other_names_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path, [make_record(i) for i in range(3)])
    for name in ("segment_old.h5", "segment_000000 (copy).h5", "segment_x.open", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    write(tmp_path, [make_record(i) for i in range(3, 5)])
    reader = RolloutReader(tmp_path)
    assert reader.problems == []
    assert reader.file_names == ["segment_000000.h5", "segment_000001.h5"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("table_rows", b"groups=ten rollouts"),
        ("table_rows", b"groups=10"),
        ("table_rows", 3.5),
        ("first_rollout_id", b"first"),
        ("format_version", b"one"),
    ],
)
def test_a_malformed_attribute_leaves_the_file_out_and_names_it(
    tmp_path: Path, name: str, value: Any
) -> None:
    write(tmp_path, [make_record(i) for i in range(30)], flush_every=10, segment_rollouts=40)
    with h5py.File(tmp_path / "segment_000001.h5", "r+", locking=False) as file:
        file.attrs[name] = value
    reader = RolloutReader(tmp_path)
    assert len(reader.problems) == 1
    assert f"segment_000001.h5 is damaged: its attribute {name} is" in reader.problems[0]
    assert reader.column("groups/group_id").tolist() == [*range(10), *range(20, 30)]


def test_a_missing_attribute_and_a_file_of_something_else_are_left_out_too(tmp_path: Path) -> None:
    write(tmp_path, [make_record(i) for i in range(30)], flush_every=10, segment_rollouts=40)
    with h5py.File(tmp_path / "segment_000001.h5", "r+", locking=False) as file:
        del file.attrs["table_rows"]
    with h5py.File(tmp_path / "segment_000002.h5", "w") as file:
        file["x"] = 1
    (tmp_path / "segment_000003.h5").write_bytes(b"")
    problems = RolloutReader(tmp_path).problems
    assert "segment_000001.h5 is damaged: its attribute table_rows is None" in problems[0]
    assert "segment_000002.h5 is not a file of the rollout store" in problems[1]
    assert "segment_000003.h5 cannot be opened" in problems[2]


def test_a_bit_that_flips_in_a_small_column_is_noticed_by_its_checksum(tmp_path: Path) -> None:
    write(tmp_path, [make_record(i) for i in range(4)])
    path = tmp_path / "segment_000000.h5"
    with h5py.File(path, "r", locking=False) as file:
        offset = file["rollouts/reward"].id.get_offset()
    data = bytearray(path.read_bytes())
    data[offset + 3] ^= 1
    path.write_bytes(data)
    file = RolloutFile(path, path.name)
    _, faults = file.checked_block()
    assert faults == [f"rollouts/reward of {path.name} cannot be read: its checksum is wrong"]


def test_a_large_flush_without_compression_is_a_closed_segment_at_once(tmp_path: Path) -> None:
    records = [make_record(i) for i in range(40)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment, "max_bytes", lambda config: 200_000)
        writer = open_writer(tmp_path, compression="none")
        writer.append(records[0])
        writer.flush(30)
        for record in records[1:]:
            writer.append(record)
        writer.flush(30)
        wait_for_names(tmp_path, ["segment_000000.h5", "segment_000001.h5"])
        check_equal(RolloutReader(tmp_path), records)
        writer.close()
    with h5py.File(tmp_path / "segment_000001.h5", "r", locking=False) as file:
        assert file.attrs["part"] == -1 and file["tokens/id"].chunks is None


def test_a_copied_folder_reads_alike(tmp_path: Path) -> None:
    records = [make_record(i) for i in range(12)]
    write(tmp_path / "a", records)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    check_equal(RolloutReader(tmp_path / "b"), records)
