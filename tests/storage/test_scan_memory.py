"""Reading a run file by file takes the memory of one file, however long the run."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import numpy as np

from llamarl_hpc.cli.bench_rollouts import make_group
from llamarl_hpc.storage.rollout_store import RolloutReader, build
from llamarl_hpc.storage.rollout_store.encode import encode
from llamarl_hpc.storage.rollout_store.names import segment_path
from llamarl_hpc.storage.rollout_store.reader import MAX_OPEN_FILES


def write_segments(folder: Path, number: int, *, tokens: int) -> None:
    """Segments of 64 rollouts with so many tokens each."""
    groups = [make_group(np.random.default_rng(g), g, tokens) for g in range(8)]
    block = build.from_records(groups, reward_names=["exact"], first_rollout_id=0)
    image = b"".join(encode(block, {"first_rollout_id": 0}, compression="gzip"))
    for index in range(number):
        segment_path(folder, index).write_bytes(image)


def peak_of_a_scan(folder: Path) -> tuple[int, int]:
    """(bytes allocated at most, bytes of the token columns of all files)."""
    reader, total = RolloutReader(folder), 0
    tracemalloc.start()
    for _, file in reader.scan():
        for name in ("id", "logprob_behaviour", "logprob_trainer", "loss_mask"):
            total += file.read(f"tokens/{name}").nbytes
        gc.collect()  # what the interpreter has not come to yet is not held
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    reader.close()
    return peak, total


def test_a_scan_of_many_files_takes_the_memory_of_one(tmp_path: Path) -> None:
    few, many = tmp_path / "few", tmp_path / "many"
    for folder, number in ((few, 2), (many, 12)):
        folder.mkdir()
        write_segments(folder, number, tokens=6_000)  # much more than an open file itself takes
    (peak_few, total_few), (peak_many, total_many) = peak_of_a_scan(few), peak_of_a_scan(many)
    assert total_many == 6 * total_few
    assert peak_many < 1.5 * peak_few
    assert peak_many < total_many / 4


def test_more_files_than_can_be_open_at_once_are_scanned_from_either_end(tmp_path: Path) -> None:
    number = MAX_OPEN_FILES + 3
    write_segments(tmp_path, number, tokens=2)
    reader = RolloutReader(tmp_path)
    names = [name for name, file in reader.scan() if file.read("rollouts/status").size]
    newest = [n for n, file in reader.scan(newest_first=True) if file.read("rollouts/status").size]
    reader.close()
    assert len(names) == number
    assert newest == names[::-1]
