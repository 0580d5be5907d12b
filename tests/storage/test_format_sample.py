"""The frozen sample of format 1 is what users' files of years ago look like: it must stay readable.

`data/format1_sample.h5` and its contents as JSON (null: NaN) are never written again. A change that
breaks one of these tests needs a new format number and a reader for both.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest

from llamarl_hpc.storage.rollout_store import RolloutReader, blocks
from llamarl_hpc.storage.rollout_store.checksums import checksum
from llamarl_hpc.storage.rollout_store.file import RolloutFile

DATA = Path(__file__).parent / "data"
SAMPLE = DATA / "format1_sample.h5"
EXPECTED = json.loads((DATA / "format1_sample.json").read_text())


def test_every_column_of_the_sample_reads_as_it_was_written() -> None:
    file = RolloutFile(SAMPLE, "sample")
    assert set(file.paths()) >= set(EXPECTED)
    for path, expected in EXPECTED.items():
        array = file.read(path)
        if array.dtype.kind == "S":
            assert [text.decode() for text in array.tolist()] == expected, path
        else:
            wanted = np.array([np.nan if v is None else v for v in expected], dtype=np.float64)
            np.testing.assert_array_equal(array.astype(np.float64), wanted, err_msg=path)
    assert file.attributes["run_id"] == "sample" and file.attributes["config"] == "name: sample\n"
    assert file.reward_names() == ["math_answer", "length.penalty"]
    block = file.block()
    assert blocks.problems(block) == [] and file.damaged_columns(block) == []


def test_the_sample_is_a_store_of_one_segment(tmp_path: Path) -> None:
    shutil.copy(SAMPLE, tmp_path / "segment_000000.h5")
    reader = RolloutReader(tmp_path)
    assert reader.problems == []
    assert (reader.num_rows("groups"), reader.num_rows("rollouts")) == (5, 7)
    row = reader.find_rollout((1 << 32) + 3)
    offset, length = reader.row("rollouts", row, ["token_offset", "completion_length"]).values()
    assert length == 1100
    ids = EXPECTED["tokens/id"][offset : offset + length]
    assert reader.slice("tokens/id", offset, length).tolist() == ids


def test_plain_h5py_and_pandas_open_the_sample_by_the_documented_recipe() -> None:
    with h5py.File(SAMPLE, "r", locking=False) as file:
        reward = file["rollouts/reward"][:]
        i = 1
        at, n = file["rollouts/text_offset"][i], file["rollouts/text_length"][i]
        text = file["text/utf8"][at : at + n].tobytes().decode()
        names = ["step", "status", "reward", "completion_length"]
        frame = pd.DataFrame({name: file[f"rollouts/{name}"][:] for name in names})
        written = dict(e.rsplit("=", 1) for e in file.attrs["checksums"].decode().split())
        assert checksum(reward) == written["rollouts/reward"]
        assert file["tokens/id"].compression == "gzip"
    raw = bytes(EXPECTED["text/utf8"])
    at, n = EXPECTED["rollouts/text_offset"][1], EXPECTED["rollouts/text_length"][1]
    assert text == raw[at : at + n].decode()
    assert frame["reward"].tolist() == EXPECTED["rollouts/reward"]
    assert frame["status"].tolist() == EXPECTED["rollouts/status"]


def test_the_recipes_of_the_document_run_on_the_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rollouts").mkdir()
    shutil.copy(SAMPLE, tmp_path / "rollouts" / "segment_000000.h5")
    monkeypatch.chdir(tmp_path)
    document = Path(__file__).parents[2] / "docs" / "rollout-format.md"
    recipes = re.findall(r"^```python\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)
    plain = [recipe for recipe in recipes if "analysis" not in recipe]
    assert len(plain) == 2
    for recipe in plain:
        exec(compile(recipe, str(document), "exec"), {})
    assert "Name: reward, dtype: float64" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("h5dump") is None, reason="no h5dump (Debian: hdf5-tools)")
def test_h5dump_prints_the_sample() -> None:
    done = subprocess.run(
        ["h5dump", "-d", "/rollouts/completion_length", "-y", "-w", "0", str(SAMPLE)],
        capture_output=True,
        text=True,
        check=True,
    )
    lengths = ", ".join(str(n) for n in EXPECTED["rollouts/completion_length"])
    assert lengths in done.stdout
