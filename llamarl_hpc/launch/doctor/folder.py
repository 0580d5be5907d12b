"""A folder for runs, from one machine: kind of file system, room, quota, locks.

Whether other nodes see the same folder is the business of the probes (`probe.py`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from llamarl_hpc.launch.doctor.finding import Finding, fail, ok, warn
from llamarl_hpc.launch.queue import Run

_MIB = 1 << 20
_LOCAL = {"ext4", "ext3", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "squashfs"}
_TRY_S = 30.0


def check_folder(folder: Path, run: Run, *, needed_bytes: int, shared: bool) -> Iterator[Finding]:
    """All checks. `shared`: other nodes must see it; `needed_bytes`: what a run will write."""
    kind = file_system(folder, Path("/proc/mounts").read_text())
    yield check_kind(folder, kind, shared=shared)
    yield check_space(folder, needed_bytes=needed_bytes)
    yield check_quota(folder, kind, run)
    yield check_lock(folder)
    yield check_hdf5(folder)


def file_system(folder: Path, mounts: str) -> str:
    """Type of the file system, from the text of /proc/mounts; empty when it is not there."""
    path, best, kind = str(folder.resolve()), "", ""
    for line in mounts.splitlines():
        _, place, name, *_ = [*line.split(), "", "", ""]
        place = place.replace("\\040", " ")
        inside = path == place or path.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(best):
            best, kind = place, name
    return kind


def check_kind(folder: Path, kind: str, *, shared: bool) -> Finding:
    if shared and kind in _LOCAL:
        return warn(
            "file_system",
            f"{folder} lies on {kind}, which is usually local to a node",
            "choose a folder that all nodes see (runs_dir, or --run-dir)",
            kind=kind,
        )
    return ok("file_system", f"{folder} lies on {kind or 'an unknown file system'}", kind=kind)


def check_space(folder: Path, *, needed_bytes: int) -> Finding:
    """Room for what a run writes, and inodes."""
    stats = os.statvfs(folder)
    free, inodes = stats.f_bavail * stats.f_frsize, stats.f_favail
    figures = {"free_mib": free // _MIB, "needed_mib": needed_bytes // _MIB, "inodes": inodes}
    if stats.f_files and inodes < 1000:
        return fail("space", f"{folder} has {inodes} inodes left", "remove files", **figures)
    if free < needed_bytes:
        return warn(
            "space",
            f"{folder} has {free // _MIB:,} MiB free but checkpoints of this run may take "
            f"{needed_bytes // _MIB:,} MiB",
            "make room, lower trainer.save_total_limit, or choose another runs_dir",
            **figures,
        )
    return ok("space", f"{free // _MIB:,} MiB are free", **figures)


def check_quota(folder: Path, kind: str, run: Run) -> Finding:
    """A quota that is exceeded: by writing, and by asking where there is a command for it."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            file.write(b"\0" * _MIB)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        reason = error.strerror or str(error)
        full = error.errno in (errno.EDQUOT, errno.ENOSPC)
        advice = "remove files or ask for more quota" if full else "choose a folder of yours"
        return fail("quota", f"a file of 1 MiB cannot be written to {folder}: {reason}", advice)
    if kind == "lustre" and shutil.which("lfs"):
        answer = run(["lfs", "quota", "-q", "-u", str(os.getuid()), str(folder)])
        over = "*" in answer.stdout
    elif shutil.which("quota"):
        answer = run(["quota", "-q"])  # says only what is exceeded
        over = bool(answer.stdout.strip())
    else:
        return ok("quota", "a file of 1 MiB can be written (no command tells the quota here)")
    if over:
        words = " ".join(answer.stdout.split())[:200]
        return warn("quota", f"a quota is exceeded: {words}", "remove files before the run")
    return ok("quota", "no quota is exceeded")


def check_lock(folder: Path) -> Finding:
    """The lock by which a run folder has one controller."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return fail(
                "file_lock",
                f"files in {folder} cannot be locked ({error.strerror}), so a run cannot start",
                "choose another runs_dir; Lustre needs to be mounted with flock",
            )
    return ok("file_lock", "files can be locked")


def check_hdf5(folder: Path) -> Finding:
    """Whether HDF5's own locks work, in a process that can be killed."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".doctor-") as name:
        argv = [sys.executable, "-m", "llamarl_hpc.storage.hdf5_lock", name]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=_TRY_S, check=False)
        except subprocess.TimeoutExpired:
            return _no_hdf5_lock(folder, f"HDF5 hangs there for {_TRY_S:.0f} s")
    if done.returncode:
        last = (done.stderr.splitlines() or [f"exit code {done.returncode}"])[-1]
        return _no_hdf5_lock(folder, last)
    return ok("hdf5_lock", "HDF5 can lock files; HDF5_USE_FILE_LOCKING need not be set")


def _no_hdf5_lock(folder: Path, why: str) -> Finding:
    return warn(
        "hdf5_lock",
        f"HDF5 cannot lock files in {folder} ({why})",
        "the run does not lock; set HDF5_USE_FILE_LOCKING=FALSE for other tools that read rollouts",
    )
