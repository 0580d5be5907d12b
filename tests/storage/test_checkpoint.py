"""Checkpoints: whole or not there, and never the last one gone."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from llamarl_hpc.errors import ConfigError, StoreError
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.storage import atomic
from llamarl_hpc.storage.checkpoint import CheckpointStore


def new_store(tmp_path: Path, keep: int = 2) -> CheckpointStore:
    return CheckpointStore(RunDir(tmp_path), keep)


def save(store: CheckpointStore, step: int, content: str = "weights") -> Path:
    folder = store.begin(step)
    (folder / "zero").mkdir()
    (folder / "zero" / "rank_0.pt").write_text(f"{content} {step}")
    return store.commit(step, {"step": step, "cursor": [1, 2]})


def names(tmp_path: Path) -> list[str]:
    return sorted(os.listdir(tmp_path / "checkpoints"))


def test_a_checkpoint_comes_back_with_its_state(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    assert store.latest() is None
    path = save(store, 100)
    assert path == tmp_path / "checkpoints" / "step_000100"
    found = new_store(tmp_path).latest()
    assert found is not None
    assert (found.step, found.path, found.warnings) == (100, path, [])
    assert found.state == {"step": 100, "cursor": [1, 2]}
    assert (path / "zero" / "rank_0.pt").read_text() == "weights 100"
    assert json.loads((tmp_path / "latest.json").read_text()) == {
        "step": 100,
        "path": "checkpoints/step_000100",
    }
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["files"]["zero/rank_0.pt"]["size"] == 11
    assert len(manifest["files"]["state.json"]["xxh3_128"]) == 32


def test_resume_takes_the_newest_that_validates_and_says_what_it_passed_over(
    tmp_path: Path,
) -> None:
    store = new_store(tmp_path, keep=9)
    save(store, 10)
    shard = save(store, 20) / "zero" / "rank_0.pt"
    shard.write_text(shard.read_text()[:-1])
    (tmp_path / "checkpoints" / "step_000030.tmp").mkdir()
    (tmp_path / "latest.json").write_text('{"step": 30, "path": "checkpoints/step_000030"}')
    found = store.latest()
    assert found is not None and found.step == 10
    assert found.warnings == [
        "step_000030.tmp was passed over: it was never finished",
        "step_000020 was passed over: zero/rank_0.pt has 9 bytes instead of 10",
    ]


def test_a_changed_byte_is_found_by_its_hash(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    save(store, 1)
    shard = save(store, 2) / "zero" / "rank_0.pt"
    shard.write_text("Weights 2")
    found = store.latest()
    assert found is not None and found.step == 1
    assert "does not have the hash" in found.warnings[0]


@pytest.mark.parametrize("lost", ["zero/rank_0.pt", "COMPLETE", "manifest.json", "state.json"])
def test_a_missing_file_makes_a_checkpoint_invalid(tmp_path: Path, lost: str) -> None:
    store = new_store(tmp_path)
    save(store, 1)
    (save(store, 2) / lost).unlink()
    found = store.latest()
    assert found is not None and found.step == 1 and len(found.warnings) == 1


def test_when_none_is_whole_it_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    (save(store, 7) / "COMPLETE").unlink()
    with pytest.raises(StoreError, match=r"none of the checkpoints .*step_000007 was passed over"):
        store.latest()


def test_rotation_goes_by_number_and_keeps_what_was_asked_for(tmp_path: Path) -> None:
    store = new_store(tmp_path, keep=2)
    for step in (9, 10, 100):
        save(store, step)
    assert names(tmp_path) == ["step_000010", "step_000100"]
    save(store, 1_000_000)
    save(store, 1_000_001)
    assert names(tmp_path) == ["step_1000000", "step_1000001"]


def test_the_best_survives_rotation_until_there_is_a_better_one(tmp_path: Path) -> None:
    store = new_store(tmp_path, keep=1)
    assert store.best() is None
    save(store, 1)
    store.mark_best(1, 1, 0.5)
    save(store, 2)
    save(store, 3)
    assert names(tmp_path) == ["step_000001", "step_000003"]
    found = new_store(tmp_path).best()
    assert found == {
        "step": 1, "policy_version": 1, "accuracy": 0.5, "path": "checkpoints/step_000001"
    }  # fmt: skip
    store.mark_best(3, 3, 0.75)
    store.waits_for_accuracy = 4
    for step in (4, 5, 6):
        save(store, step)
    assert names(tmp_path) == ["step_000003", "step_000004", "step_000006"]
    store.mark_best(2, 2, 0.9)  # gone
    assert store.best() == {**found, "step": 3, "policy_version": 3, "accuracy": 0.75,
                            "path": "checkpoints/step_000003"}  # fmt: skip
    store.forget_best_after(3)
    assert store.best() is not None
    store.forget_best_after(2)
    assert store.best() is None


def test_keeping_none_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="save_total_limit is 0"):
        new_store(tmp_path, keep=0)


def test_a_failed_save_removes_its_own_folder_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store(tmp_path, keep=1)
    save(store, 10)

    def full(path: Path, text: str) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "write_text", full)
        with pytest.raises(StoreError, match=r"step 20 could not be written .*quota exceeded"):
            save(store, 20)
    assert names(tmp_path) == ["step_000010"]
    found = store.latest()
    assert found is not None and found.step == 10
    save(store, 20)
    assert names(tmp_path) == ["step_000020"]


def test_a_disk_that_is_visibly_too_full_is_refused_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store(tmp_path)
    save(store, 1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(StoreError, match=r"has 0.0 MiB free; free some space"):
        store.begin(2)
    assert names(tmp_path) == ["step_000001"]


def test_abort_and_the_next_begin_remove_half_written_ones(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    (store.begin(1) / "x").write_text("x")
    store.abort(1)
    assert names(tmp_path) == []
    (store.begin(2) / "x").write_text("x")
    folder = store.begin(3)
    assert names(tmp_path) == ["step_000003.tmp"] and os.listdir(folder) == []


def test_numbers_above_the_step_are_of_an_abandoned_branch_and_go_with_the_next_save(
    tmp_path: Path,
) -> None:
    store = new_store(tmp_path, keep=2)
    save(store, 10)
    (save(store, 30) / "COMPLETE").unlink()
    found = store.latest()
    assert found is not None and found.step == 10
    save(store, 20)
    assert names(tmp_path) == ["step_000010", "step_000020"]


def test_saving_a_step_again_replaces_it_without_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store(tmp_path, keep=1)
    save(store, 5, "old")
    rename = os.rename

    def killed_between(source: Path, target: Path) -> None:
        if str(source).endswith(".tmp"):
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", killed_between)
        with pytest.raises(KeyboardInterrupt):
            save(store, 5, "new")
    found = store.latest()
    assert found is not None
    assert (found.path / "zero" / "rank_0.pt").read_text() == "old 5"
    path = save(store, 5, "newer")
    assert (path / "zero" / "rank_0.pt").read_text() == "newer 5"
    assert names(tmp_path) == ["step_000005"]


SAVER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from llamarl_hpc.run_dir import RunDir
    from llamarl_hpc.storage.checkpoint import CheckpointStore
    store = CheckpointStore(RunDir(Path(sys.argv[1])), 1)
    found = store.latest()
    step = found.step if found else 0
    print("at", step, flush=True)
    while True:
        step += 1
        folder = store.begin(step)
        for rank in range(4):
            (folder / f"rank_{rank}.pt").write_bytes(bytes([step % 256]) * 200_000)
        store.commit(step, {"step": step})
        print("at", step, flush=True)
    """
)


def test_kill_9_while_saving_always_leaves_a_whole_one(tmp_path: Path) -> None:
    rng = random.Random(3)
    last = 0
    for _ in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline().startswith("at")
        lines = [process.stdout.readline() for _ in range(rng.randint(0, 5))]
        time.sleep(rng.uniform(0.0, 0.05))
        process.kill()
        words = "".join([*lines, process.stdout.read()]).split()
        process.wait()
        last = max([last, *(int(word) for word in words if word.isdigit())])
        found = new_store(tmp_path, keep=1).latest()
        assert (found is None and last == 0) or (
            found is not None and last <= found.step <= last + 1
        )
    assert last > 0
