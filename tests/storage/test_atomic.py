"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from llamarl_hpc.storage import atomic


def test_json_is_replaced_and_nothing_is_left_beside(tmp_path: Path) -> None:
    path = tmp_path / "latest.json"
    atomic.write_json(path, {"step": 1})
    atomic.write_json(path, {"step": 2})
    assert path.read_text() == '{\n  "step": 2\n}\n'
    assert os.listdir(tmp_path) == ["latest.json"]


def test_a_full_disk_leaves_the_old_content_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    atomic.write_text(path, "old")

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="No space left"):
        atomic.write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["state.json"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writev = os.writev
    monkeypatch.setattr(os, "writev", lambda fd, data: writev(fd, [bytes(data[0])[:3]]))
    atomic.write_bytes(tmp_path / "x", b"0123456789")
    assert (tmp_path / "x").read_bytes() == b"0123456789"


def test_nan_is_refused_because_other_json_readers_refuse_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        atomic.write_json(tmp_path / "x.json", {"loss": float("nan")})
