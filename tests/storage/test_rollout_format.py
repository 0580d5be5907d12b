"""The rollout store's files as any HDF5 sees them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from make_records import make_record, with_reference
from store_checks import check_equal, write

from llamarl_hpc.errors import StoreError
from llamarl_hpc.storage.rollout_store import build
from llamarl_hpc.storage.rollout_store import encode as encoding
from llamarl_hpc.storage.rollout_store.encode import encode
from llamarl_hpc.storage.rollout_store.file import (
    RolloutFile,
)
from llamarl_hpc.storage.rollout_store.layout import COLUMNS, describe
from llamarl_hpc.storage.rollout_store.reader import RolloutReader
from llamarl_hpc.storage.rollout_store.template import make_template


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


def test_the_frozen_sample_of_minor_2_is_believed_and_read_with_all_its_columns() -> None:
    """A closed segment (compressed, every column with its checksum) and a part of an open one."""
    sample = Path(__file__).parent / "golden" / "format_1_2"
    with h5py.File(sample / "segment_000000.h5", locking=False) as plain:
        assert plain["tokens/entropy"].compression == "gzip" and plain["tokens/id"].fletcher32
    reader, records = RolloutReader(sample), [with_reference(i) for i in range(26)]
    assert reader.file_names == ["segment_000000.h5", "segment_000001.open/part_000000.h5"]
    assert reader.problems == [] and reader.attributes["run_id"] == "r1"
    check_equal(reader, records)
    for column, field in (("entropy", "entropy"), ("logprob_reference", "logprobs_reference")):
        written = np.concatenate([array for record in records for array in getattr(record, field)])
        np.testing.assert_array_equal(reader.column(f"tokens/{column}"), written)
    for name, file in reader.scan():
        assert file.header.all_checked and file.checked_block()[1] == [], name


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
    block = build.from_records([make_record(0)], reward_names=[], first_rollout_id=0)
    del block["rollouts/temperature"]
    path = tmp_path / "segment_000000.h5"
    path.write_bytes(b"".join(encode(block, {"first_rollout_id": 0})))
    with h5py.File(path, "r+", locking=False) as added:
        added["rollouts/colour"] = np.zeros(4)
    file = RolloutFile(path, "s")
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
