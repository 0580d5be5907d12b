"""Folders for runs: kind of file system, room, quota, locks; and lines between machines."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llamarl_hpc.launch.doctor import folder as checks
from llamarl_hpc.launch.doctor.network import Peer, ask_time, measure
from llamarl_hpc.launch.queue import Answer

MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
lustre@o2ib:/scratch /scratch lustre rw,flock 0 0
nfs:/home /home nfs4 rw 0 0
tmpfs /scratch/ram\\040disk tmpfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/scratch/me/runs", "lustre"),
        ("/scratch2/me", "ext4"),
        ("/home/me", "nfs4"),
        ("/scratch/ram disk/x", "tmpfs"),
    ],
)
def test_the_nearest_mount_tells_the_file_system(path: str, kind: str) -> None:
    assert checks.file_system(Path(path), MOUNTS) == kind


def test_a_local_disk_is_no_place_for_a_run_on_many_nodes() -> None:
    finding = checks.check_kind(Path("/tmp/x"), "ext4", shared=True)
    assert finding.verdict == "warn" and "runs_dir" in finding.advice
    assert checks.check_kind(Path("/tmp/x"), "ext4", shared=False).verdict == "ok"
    assert checks.check_kind(Path("/s"), "lustre", shared=True).verdict == "ok"


def test_room_is_compared_with_what_checkpoints_take(tmp_path: Path) -> None:
    assert checks.check_space(tmp_path, needed_bytes=0).verdict == "ok"
    finding = checks.check_space(tmp_path, needed_bytes=1 << 60)
    assert finding.verdict == "warn" and "trainer.save_total_limit" in finding.advice


def quota_says(stdout: str) -> Any:
    def run(argv: Sequence[str]) -> Answer:
        return Answer(returncode=0, stdout=stdout, stderr="")

    return run


def test_a_quota_that_is_exceeded_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name)
    over = checks.check_quota(tmp_path, "lustre", quota_says("/scratch 11* 10 20 -"))
    assert over.verdict == "warn" and "11* 10" in over.sentence
    assert checks.check_quota(tmp_path, "lustre", quota_says("/s 9 10 20 -")).verdict == "ok"
    assert checks.check_quota(tmp_path, "nfs4", quota_says("")).verdict == "ok"
    monkeypatch.setattr(
        "tempfile.NamedTemporaryFile",
        lambda **options: (_ for _ in ()).throw(OSError(errno.EDQUOT, "Disk quota exceeded")),
    )
    full = checks.check_quota(tmp_path, "lustre", quota_says(""))
    assert full.verdict == "fail" and "Disk quota exceeded" in full.sentence


def test_a_file_system_without_locks_cannot_hold_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checks.check_lock(tmp_path).verdict == "ok"

    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    finding = checks.check_lock(tmp_path)
    assert finding.verdict == "fail" and "mounted with flock" in finding.advice


def test_hdf5_locks_are_tried_in_a_process_that_can_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checks.check_hdf5(tmp_path).verdict == "ok"
    assert list(tmp_path.iterdir()) == []
    broken = [sys.executable, "-c", "raise OSError('unable to lock file, errno = 38')"]
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda argv, **options: run(broken, **options))
    finding = checks.check_hdf5(tmp_path)
    assert finding.verdict == "warn" and "unable to lock file" in finding.sentence
    assert "HDF5_USE_FILE_LOCKING=FALSE" in finding.advice

    def hang(argv: Sequence[str], **options: Any) -> None:
        raise subprocess.TimeoutExpired(argv, 30.0)

    monkeypatch.setattr(subprocess, "run", hang)
    assert "HDF5 hangs there" in checks.check_hdf5(tmp_path).sentence


# ------------------------------------------------------------------ lines


def test_a_peer_tells_the_time_and_takes_data() -> None:
    peer = Peer("secret", timeout_s=5.0)
    assert abs(ask_time("127.0.0.1", peer.port, "secret", 5.0)) < 1.0
    assert measure("127.0.0.1", peer.port, "secret", 5.0, size=100_001) > 0.0
    with pytest.raises(OSError):
        ask_time("127.0.0.1", peer.port, "others", 5.0)
    peer.close()
    with pytest.raises(OSError):
        ask_time("127.0.0.1", peer.port, "secret", 1.0)
