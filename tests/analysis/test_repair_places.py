"""rollouts repair where the run, or the place for its copy, cannot be written."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import filelock
import pytest
from synthetic_run import Plan, begin_attempt, make_run

from llamarl_hpc.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = make_run(tmp_path / "r", Plan(num_steps=1, prompts_per_step=1, heldout=1))
    made.lock.touch()
    return made


def refuse(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number), "a file")

    monkeypatch.setattr(owner, name, refused)


def test_a_run_that_is_read_only_here_is_repaired_elsewhere(
    run: RunDir, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, filelock.FileLock, "acquire", errno.EROFS)
    code, _, error = call("rollouts", "repair", run.path, "--out", tmp_path / "copy")
    assert code == 0, error
    assert call("rollouts", "verify", tmp_path / "copy")[0] == 0
    begin_attempt(run, 2, resumed_from_step=1, started=0.0)  # whose end cannot be told without lock
    words = ("rollouts", "repair", run.path, "--out", tmp_path / "again")
    code, _, error = call(*words)
    assert code == 2 and "left as running" in error and "--force" in error
    assert call(*words, "--force")[0] == 0


def test_a_copy_that_finds_no_room_names_its_place_and_leaves_nothing(
    run: RunDir, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, shutil, "copyfile", errno.ENOSPC)
    code, _, error = call("rollouts", "repair", run.path, "--out", tmp_path / "copy")
    assert code == 2 and f"to {tmp_path / 'copy'}: No space left on device" in error
    assert not (tmp_path / "copy").exists()
