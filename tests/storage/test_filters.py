"""Compression by choice: plugins are asked for only when a file needs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import pytest
from make_records import make_record

from llamarl_hpc.config.schema import StorageConfig
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.storage.rollout_store import RolloutReader, RolloutWriter, filters
from llamarl_hpc.storage.rollout_store.filters import MissingFilterError, load_filters

PLUGINS = ("zstd", "blosc2")
READ = """
import sys
from pathlib import Path
from llamarl_hpc.storage.rollout_store import RolloutReader
reader = RolloutReader(Path(sys.argv[1]))
print("hdf5plugin" in sys.modules)
print(int(reader.column("tokens/id").sum()))
print("hdf5plugin" in sys.modules)
"""


def write(folder: Path, compression: Any) -> None:
    config = StorageConfig(compression=compression)
    with RolloutWriter(
        folder, attempt=1, config=config, attributes={}, reward_names=["math_answer"]
    ) as writer:
        for i in range(100):
            writer.append(make_record(i))


@pytest.mark.parametrize("compression", PLUGINS)
def test_a_plugin_is_imported_by_the_reader_that_needs_it(tmp_path: Path, compression: str) -> None:
    pytest.importorskip("hdf5plugin")
    write(tmp_path, compression)
    with h5py.File(tmp_path / "segment_000000.h5", "r", locking=False) as file:
        creation = file["tokens/id"].id.get_create_plist()
        ids = [creation.get_filter(i)[0] for i in range(creation.get_nfilters())]
    assert filters.PLUGINS[compression] in ids and h5py.h5z.FILTER_FLETCHER32 in ids
    words = [sys.executable, "-c", READ, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    total = sum(int(c.token_ids.sum()) for i in range(100) for c in make_record(i).completions)
    assert done.stdout.split() == ["False", str(total), "True"]


def test_without_a_plugin_the_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filters, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"zstd but hdf5plugin is not installed; pip install"):
        write(tmp_path, "zstd")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("h5py.h5z.filter_avail", lambda number: number != 32015)
    dataset = type("D", (), {"get_create_plist": lambda self: Creation()})()
    with pytest.raises(
        MissingFilterError, match=r"s\.h5 is compressed with zstd, .* pip install hdf5plugin"
    ):
        load_filters(dataset, "s.h5")


class Creation:
    """A dataset's filters: shuffle, zstd, checksum."""

    def get_nfilters(self) -> int:
        return 3

    def get_filter(self, index: int) -> tuple[int]:
        return ((2, 32015, 3)[index],)


def test_a_missing_plugin_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "gzip")

    def refused(dataset: Any, name: str) -> bool:
        raise MissingFilterError(f"{name} is compressed with zstd; pip install hdf5plugin")

    monkeypatch.setattr("llamarl_hpc.storage.rollout_store.file.load_filters", refused)
    reader = RolloutReader(tmp_path)
    file = next(iter(reader.scan()))[1]
    with pytest.raises(MissingFilterError):
        file.read_what_can_be("tokens/id")
    assert reader.problems == []


def test_the_store_does_not_import_the_plugin() -> None:
    code = "import sys, llamarl_hpc.storage.rollout_store; print('hdf5plugin' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
