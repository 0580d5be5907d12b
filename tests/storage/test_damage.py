"""Bytes of the store's files are changed at random: what is read is true, or said to be damaged."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from make_records import make_record
from store_checks import write

from llamarl_hpc.errors import StoreError
from llamarl_hpc.storage.rollout_store.file import RolloutFile
from llamarl_hpc.storage.rollout_store.layout import Block
from llamarl_hpc.storage.rollout_store.reader import RolloutReader
from llamarl_hpc.storage.rollout_store.repair import repair

NUM = 60  # damages of each kind of file


@pytest.fixture(scope="module", params=["gzip", "none"])
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A closed segment; compressed, some of its columns have chunks."""
    folder = tmp_path_factory.mktemp("store")
    write(folder, [make_record(i) for i in range(24)], compression=request.param)
    return (folder / "segment_000000.h5").read_bytes()


def damaged(data: bytes, number: int) -> bytes:
    """One byte, one bit, some bytes or the end; half of them in HDF5's metadata at the front."""
    rng = random.Random(number)
    found = bytearray(data)
    at = rng.randrange(len(data) if number % 2 else min(len(data), 30_000))
    if number % 4 == 0:
        found[at] ^= 1 << rng.randrange(8)
    elif number % 4 == 1:
        found[at] = (found[at] + 1 + rng.randrange(255)) % 256
    elif number % 4 == 2:
        found[at : at + 64] = bytes(len(found[at : at + 64]))
    else:
        del found[at:]
    return bytes(found)


def equal(a: Block, b: Block) -> bool:
    same_nan = [(path, a[path].dtype.kind == "f") for path in b]
    return all(np.array_equal(a[path], b[path], equal_nan=nan) for path, nan in same_nan)


def test_a_damaged_file_is_never_read_as_something_else(sound: bytes) -> None:
    truth = RolloutFile(sound, "sound").block()
    read = 0
    for number in range(NUM):
        try:
            block = RolloutFile(damaged(sound, number), "damaged").block()
        except StoreError:
            continue
        read += 1  # what was hit holds nothing: room that is left, a unit
        assert block.keys() == truth.keys() and equal(block, truth), f"damage {number}"
    assert 0 < read < NUM


def test_single_rows_of_a_damaged_file_are_true_or_refused(sound: bytes, tmp_path: Path) -> None:
    truth = RolloutFile(sound, "sound").block()
    first = int(truth["rollouts/rollout_id"][0])
    for number in range(NUM):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "segment_000000.h5").write_bytes(damaged(sound, number))
        reader = RolloutReader(folder)
        if reader.problems:
            continue
        row = reader.find_rollout(first + 5)
        try:
            found = reader.row("rollouts", row, ["token_offset", "completion_length", "reward"])
            ids = reader.slice("tokens/id", found["token_offset"], found["completion_length"])
        except StoreError:
            continue
        at, length = truth["rollouts/token_offset"][5], truth["rollouts/completion_length"][5]
        assert ids.tolist() == truth["tokens/id"][at : at + length].tolist(), f"damage {number}"
        assert found["reward"] == truth["rollouts/reward"][5], f"damage {number}"


def test_what_repair_saves_is_sound_and_was_there(sound: bytes, tmp_path: Path) -> None:
    truth = RolloutFile(sound, "sound").block()
    rewards = dict(zip(truth["rollouts/rollout_id"], truth["rollouts/reward"], strict=True))
    saved = 0
    for number in range(NUM):
        source, target = tmp_path / f"{number}", tmp_path / f"{number}-repaired"
        source.mkdir()
        (source / "segment_000000.h5").write_bytes(damaged(sound, number))
        repair(source, target)
        reader = RolloutReader(target)
        assert reader.problems == []
        for _, file in reader.scan():
            block, faults = file.checked_block()
            assert faults == [], f"damage {number}"
            for rollout, reward in zip(
                block["rollouts/rollout_id"], block["rollouts/reward"], strict=True
            ):
                assert reward == rewards[rollout] or np.isnan(reward), f"damage {number}"
            saved += len(block["rollouts/rollout_id"])
    assert saved > len(rewards)
