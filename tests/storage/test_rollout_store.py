"""The store's format, its safety and its reader."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np
import pytest
from make_records import make_completion, make_record

from llamarl_hpc.config.schema import StorageConfig
from llamarl_hpc.errors import StoreError
from llamarl_hpc.storage import atomic
from llamarl_hpc.storage.records import GroupRecord
from llamarl_hpc.storage.rollout_store import build
from llamarl_hpc.storage.rollout_store import encode as encoding
from llamarl_hpc.storage.rollout_store import writer as writing
from llamarl_hpc.storage.rollout_store.encode import encode
from llamarl_hpc.storage.rollout_store.file import (
    RolloutFile,
    open_path,
    segment_numbers,
    segment_path,
)
from llamarl_hpc.storage.rollout_store.layout import COLUMNS, ENUMS, describe
from llamarl_hpc.storage.rollout_store.reader import RolloutReader
from llamarl_hpc.storage.rollout_store.template import make_template
from llamarl_hpc.storage.rollout_store.writer import RolloutWriter
from llamarl_hpc.types import Purpose, Status


def open_writer(folder: Path, attempt: int = 1, **config: Any) -> RolloutWriter:
    return RolloutWriter(
        folder,
        attempt=attempt,
        config=StorageConfig(**config),
        attributes={"run_id": "r1", "model": "tiny", "empty": ""},
        reward_names=["math_answer"],
        retry_s=5.0,
    )


def write(folder: Path, records: list[GroupRecord], flush_every: int = 8, **config: Any) -> None:
    with open_writer(folder, **config) as writer:
        for index, record in enumerate(records):
            writer.append(record)
            if index % flush_every == flush_every - 1:
                writer.flush(30)


def wait_for_names(folder: Path, names: list[str]) -> None:
    """A full segment is joined beside the writer."""
    deadline = time.monotonic() + 30
    while sorted(os.listdir(folder)) != names and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(os.listdir(folder)) == names


def check_equal(reader: RolloutReader, records: list[GroupRecord]) -> None:
    """Every field of every record is in the store, at its place."""
    assert reader.column("groups/group_id").tolist() == [r.group_id for r in records]
    row = 0
    for g, record in enumerate(records):
        group = reader.row(
            "groups",
            g,
            ["first_rollout", "num_rollouts", "step", "status", "t_issued", "prompt", "generator"],
        )
        assert group["first_rollout"] == row
        assert group["num_rollouts"] == len(record.completions)
        assert group["step"] == record.step
        assert group["status"] == ENUMS["status"][record.status]
        assert group["t_issued"] == record.t_issued
        name = reader.slice("generators/name", group["generator"], 1)[0]
        assert name.decode() == record.generator
        check_prompt(reader, group["prompt"], record)
        for index, completion in enumerate(record.completions):
            names = ["token_offset", "completion_length", "text_offset", "text_length", "reward"]
            stored = reader.row("rollouts", row, [*names, "advantage", "group"])
            assert stored["group"] == g
            assert stored["reward"] == record.reward[index]
            assert stored["advantage"] == record.advantage[index]
            span = (stored["token_offset"], stored["completion_length"])
            np.testing.assert_array_equal(reader.slice("tokens/id", *span), completion.token_ids)
            np.testing.assert_array_equal(
                reader.slice("tokens/logprob_behaviour", *span), completion.logprobs
            )
            np.testing.assert_array_equal(
                reader.slice("tokens/logprob_trainer", *span), record.logprobs_trainer[index]
            )
            text = reader.text("text/utf8", stored["text_offset"], stored["text_length"])
            assert text == completion.text
            row += 1
    assert reader.num_rows("rollouts") == row


def check_prompt(reader: RolloutReader, row: int, record: GroupRecord) -> None:
    names = ["token_offset", "token_length", "text_offset", "text_length", "prompt_id", "epoch"]
    prompt = reader.row("prompts", row, names)
    assert prompt["prompt_id"].decode() == record.prompt.prompt_id
    assert prompt["epoch"] == record.prompt.epoch
    text = reader.text("prompt_text/utf8", prompt["text_offset"], prompt["text_length"])
    assert text == record.prompt.text
    ids = reader.slice("prompt_tokens/id", prompt["token_offset"], prompt["token_length"])
    np.testing.assert_array_equal(ids, record.prompt.token_ids)


# ---------------------------------------------------------------- content


@pytest.mark.parametrize("compression", ["none", "gzip", "lzf"])
def test_what_is_written_is_read_open_and_closed(tmp_path: Path, compression: str) -> None:
    records = [make_record(i) for i in range(40)]
    writer = open_writer(tmp_path, compression=compression, segment_rollouts=100)
    for index, record in enumerate(records):
        writer.append(record)
        if index % 8 == 7:
            writer.flush(30)
    wait_for_names(tmp_path, ["segment_000000.h5", "segment_000001.open"])
    live = RolloutReader(tmp_path)
    check_equal(live, records)
    writer.close()
    assert sorted(os.listdir(tmp_path)) == ["segment_000000.h5", "segment_000001.h5"]
    check_equal(live, records)  # a snapshot outlives the parts it was taken from
    check_equal(RolloutReader(tmp_path), records)


def test_groups_without_completions_and_foreign_components_keep_their_rows(tmp_path: Path) -> None:
    nothing: dict[str, Any] = {"completions": [], "rewards": {}, "reward": [], "advantage": []}
    lost = make_record(
        1,
        status=Status.ABANDONED,
        reason="generator.1 died",
        step=-1,
        logprobs_trainer=[],
        **nothing,
    )
    plain = make_record(0, rewards={"math_answer": [1.0, 0.0, 0.0, 1.0]})
    write(tmp_path, [plain, lost, make_record(2)], flush_every=1)
    reader = RolloutReader(tmp_path)
    assert reader.column("groups/num_rollouts").tolist() == [4, 0, 4]
    assert reader.column("groups/first_rollout").tolist() == [0, 4, 4]
    reason = reader.column("groups/reason")
    assert reader.column("reasons/text")[reason].tolist() == [b"", b"generator.1 died", b""]
    assert sorted(reader.reward_names) == ["length.penalty", "math_answer"]
    penalty = reader.column("rewards/length.penalty")
    assert np.isnan(penalty).tolist() == [True] * 5 + [False] * 3
    assert penalty[5:].tolist() == [-0.25] * 3


def test_version_spans_staleness_and_loss_mask_are_per_rollout(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    completions = [make_completion(rng, 3, 1), make_completion(rng, 4, 6)]
    record = make_record(
        20,
        completions=completions,
        rewards={},
        reward=[0.0, 1.0],
        advantage=[-0.5, 0.5],
        logprobs_trainer=[],
        loss_mask=[np.array([False]), np.ones(6, bool)],
    )
    write(tmp_path, [record])
    reader = RolloutReader(tmp_path)
    spans = reader.columns("versions", ["rollout", "start", "end", "version"])
    rows = list(
        zip(*(spans[n].tolist() for n in ("rollout", "start", "end", "version")), strict=True)
    )
    assert rows == [(0, 0, 1, 3), (1, 0, 3, 3), (1, 3, 6, 4)]
    assert reader.column("rollouts/staleness").tolist() == [5 - 3, 5 - 3]
    assert reader.column("rollouts/version_max").tolist() == [3, 4]
    assert reader.column("tokens/loss_mask").tolist() == [0] + [1] * 6
    assert np.isnan(reader.column("tokens/logprob_trainer")).all()


def test_loss_mask_defaults_to_what_the_status_says(tmp_path: Path) -> None:
    write(tmp_path, [make_record(0, num=1), make_record(1, num=1, status=Status.DROPPED)])
    lengths = RolloutReader(tmp_path).column("rollouts/completion_length")
    mask = RolloutReader(tmp_path).column("tokens/loss_mask")
    assert mask.tolist() == [1] * lengths[0] + [0] * lengths[1]


def test_a_prompt_is_stored_once_per_segment(tmp_path: Path) -> None:
    prompt = make_record(3).prompt
    records = [
        make_record(i, prompt=prompt, purpose=Purpose.EVAL, status=Status.EVALUATION)
        for i in range(20)
    ]
    records.append(make_record(7))
    write(tmp_path, records, flush_every=4)
    reader = RolloutReader(tmp_path)
    assert reader.num_rows("prompts") == 2
    assert reader.num_rows("generators") == 2
    check_equal(reader, records)


def test_a_lone_surrogate_in_a_text_does_not_end_the_run(tmp_path: Path) -> None:
    record = make_record(0, num=1)
    completion = msgspec.structs.replace(record.completions[0], text="a\ud800b")
    write(tmp_path, [msgspec.structs.replace(record, completions=[completion])])
    reader = RolloutReader(tmp_path)
    assert reader.text("text/utf8", 0, reader.num_rows("text")) == "a?b"


# ---------------------------------------------------------------- the format


def test_any_hdf5_reads_the_files(tmp_path: Path) -> None:
    write(tmp_path, [make_record(i) for i in range(400)], flush_every=400)
    path = tmp_path / "segment_000000.h5"
    assert path.read_bytes()[8] <= 2  # superblock version, readable since HDF5 1.8
    filters: set[int] = set()
    with h5py.File(path, "r", locking=False) as file:
        assert file.attrs["format"] == b"llamarl_hpc rollouts"
        assert file.attrs["format_version"] == 1
        assert file.attrs["run_id"] == b"r1"
        for name in [path for path, column in COLUMNS.items() if not column.optional]:
            creation = file[name].id.get_create_plist()
            filters |= {creation.get_filter(i)[0] for i in range(creation.get_nfilters())}
            assert h5py.check_vlen_dtype(file[name].dtype) is None
        assert filters == {1, 2, 3}  # deflate, shuffle, fletcher32: in every build
        assert file["rollouts/completion_length"].attrs["unit"] == b"token"
        assert h5py.check_enum_dtype(file["groups/status"].dtype)["trained"] == 0
        # the recipe of docs/rollout-format.md
        at, n = file["rollouts/text_offset"][5], file["rollouts/text_length"][5]
        assert (
            file["text/utf8"][at : at + n].tobytes().decode() == make_record(1).completions[1].text
        )


def test_h5dump_reads_a_column(tmp_path: Path) -> None:
    h5dump = shutil.which("h5dump")
    if h5dump is None:
        pytest.skip("no h5dump on this machine (Debian: hdf5-tools)")
    write(tmp_path, [make_record(0)])
    done = subprocess.run(
        [h5dump, "-d", "/rollouts/reward", str(tmp_path / "segment_000000.h5")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "(0): -0.25, 0.75, -0.25, 0.75" in done.stdout


def test_the_document_describes_every_column() -> None:
    document = Path(__file__).parents[2] / "docs" / "rollout-format.md"
    assert describe() in document.read_text()


def test_the_frozen_sample_of_format_1_is_read_by_every_later_version() -> None:
    sample = Path(__file__).parent / "golden" / "format_1"
    check_equal(RolloutReader(sample), [make_record(i) for i in range(3)])


def test_number_of_objects_does_not_grow_with_rollouts(tmp_path: Path) -> None:
    def count(path: Path) -> int:
        names: list[str] = []
        with h5py.File(path, "r", locking=False) as file:
            file.visit(names.append)
        return len(names)

    few, many = tmp_path / "few", tmp_path / "many"
    write(few, [make_record(0)])
    write(many, [make_record(i) for i in range(500)], flush_every=500)
    assert count(few / "segment_000000.h5") == count(many / "segment_000000.h5") < 80


def test_a_newer_format_is_refused_with_the_way_out(tmp_path: Path) -> None:
    block = build.from_records([make_record(0)], reward_names=[], first_rollout_id=0)
    image = encode(block, {"first_rollout_id": 0})
    (tmp_path / "segment_000000.h5").write_bytes(b"".join(image))
    with h5py.File(tmp_path / "segment_000000.h5", "r+", locking=False) as file:
        file.attrs["format_version"] = 99
    with pytest.raises(
        StoreError, match=r"has format 99; .* reads up to 1, so install a newer one"
    ):
        RolloutReader(tmp_path)


def test_unknown_columns_of_a_newer_minor_are_ignored_and_missing_ones_read_as_unknown(
    tmp_path: Path,
) -> None:
    write(tmp_path, [make_record(0)])
    with h5py.File(tmp_path / "segment_000000.h5", "r+", locking=False) as file:
        file["rollouts/colour"] = np.zeros(4)
        del file["rollouts/temperature"]
    file = RolloutFile(tmp_path / "segment_000000.h5", "s")
    assert "rollouts/colour" not in file.paths()
    assert np.isnan(file.read("rollouts/temperature")).tolist() == [True] * 4


@pytest.mark.parametrize("num_groups", [0, 1, 40])
def test_a_file_from_a_template_is_the_file_that_hdf5_would_have_laid_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_groups: int
) -> None:
    records = [make_record(i) for i in range(num_groups)]
    block = build.from_records(records, reward_names=["math_answer"], first_rollout_id=7)
    attributes = {"first_rollout_id": 7, "run_id": "r", "empty": "", "t_written": 1.5}
    encode(block, attributes)
    templates = encoding._templates.values()
    assert templates and all(template is not None for template in templates)
    (tmp_path / "a.h5").write_bytes(b"".join(encode(block, attributes)))
    monkeypatch.setattr(encoding, "_template", lambda *_: None)
    (tmp_path / "b.h5").write_bytes(b"".join(encode(block, attributes)))
    names: list[str] = []
    with h5py.File(tmp_path / "a.h5") as a, h5py.File(tmp_path / "b.h5") as b:
        b.visit(names.append)
        assert dict(a.attrs) == dict(b.attrs)
        for name in names:
            assert dict(a[name].attrs) == dict(b[name].attrs)
            if isinstance(b[name], h5py.Dataset):
                assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape
                assert a[name][()].tobytes() == b[name][()].tobytes()
    if shutil.which("h5dump"):
        assert dump(tmp_path / "a.h5") == dump(tmp_path / "b.h5")


def dump(path: Path) -> list[str]:
    """What h5dump prints, but for the file's name and the room for the attributes' texts."""
    done = subprocess.run(["h5dump", str(path)], capture_output=True, text=True, check=True)
    lines = done.stdout.replace("\\000", "").splitlines()[1:]
    return [line for line in lines if "STRSIZE" not in line]


def test_without_a_template_that_reads_back_there_is_none() -> None:
    def lay_out(shapes: Any, attributes: Any) -> bytes:
        return encoding._lay_out(shapes, attributes)

    rows = {"tokens/id": 4, "text/utf8": 1}
    assert make_template(rows, {"a": 1}, lay_out, encoding._read_back) is not None
    assert make_template(rows, {"a": 1}, lay_out, lambda image: ({}, {})) is None
    assert (
        make_template(rows, {"a": 1}, lambda s, a: lay_out(s, a) * 2, lambda image: ({}, {}))
        is None
    )


def test_too_long_an_attribute_is_refused_by_name() -> None:
    block = build.from_records([], reward_names=[], first_rollout_id=0)
    with pytest.raises(StoreError, match="attribute 'config' has 40000 bytes"):
        encode(block, {"config": "x" * 40_000})


def test_a_bit_that_flips_is_noticed_on_reading(tmp_path: Path) -> None:
    write(tmp_path, [make_record(i) for i in range(400)], flush_every=400)
    path = tmp_path / "segment_000000.h5"
    with h5py.File(path, "r", locking=False) as file:
        chunk = file["tokens/id"].id.get_chunk_info(0)
    data = bytearray(path.read_bytes())
    data[chunk.byte_offset + chunk.size // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"tokens/id of segment_000000\.h5 cannot be read"):
        RolloutReader(tmp_path).column("tokens/id")


# ---------------------------------------------------------------- segments and attempts


def test_segments_close_by_rollouts_by_size_and_by_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [make_record(i) for i in range(60)]
    write(tmp_path / "rows", records, flush_every=5, segment_rollouts=40)
    assert len(os.listdir(tmp_path / "rows")) == 6
    monkeypatch.setattr(writing, "MAX_PARTS", 3)
    write(tmp_path / "parts", records, flush_every=5)
    assert len(os.listdir(tmp_path / "parts")) == 4
    monkeypatch.setattr(RolloutWriter, "_max_bytes", 30_000)
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
    assert file.damaged_columns(file.block()) == ["rollouts/reward"]


def test_a_large_flush_without_compression_is_a_closed_segment_at_once(tmp_path: Path) -> None:
    records = [make_record(i) for i in range(40)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutWriter, "_max_bytes", 200_000)
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


# ---------------------------------------------------------------- the writer's manners


def test_close_twice_is_fine_and_appending_after_it_is_not(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    writer.append(make_record(0))
    writer.close()
    writer.close()
    with pytest.raises(StoreError, match="the rollout writer is closed"):
        writer.append(make_record(1))
    assert RolloutReader(tmp_path).num_rows("groups") == 1


def test_a_full_disk_is_waited_out_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_bytes, failures = atomic.write_bytes, [errno.ENOSPC, errno.EDQUOT, errno.ESTALE]

    def sometimes_full(path: Path, data: Any, **options: Any) -> None:
        if failures:
            code = failures.pop()
            raise OSError(code, os.strerror(code))
        write_bytes(path, data, **options)

    monkeypatch.setattr(atomic, "write_bytes", sometimes_full)
    records = [make_record(i) for i in range(3)]
    with caplog.at_level(logging.WARNING):
        write(tmp_path, records, flush_every=1)
    check_equal(RolloutReader(tmp_path), records)
    assert sum("nothing is lost" in message for message in caplog.messages) == 3


def test_an_error_that_stays_is_raised_to_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, data: Any, **options: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(atomic, "write_bytes", refused)
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
