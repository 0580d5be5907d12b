"""How much memory this process holds, from the kernel (Linux). 0 where it does not say."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")


def resident_bytes() -> int:
    return _read("VmRSS:")


def peak_bytes() -> int:
    """Most that was resident since the process began to run its program. Unlike getrusage, which
    also counts what the parent held when it forked."""
    return _read("VmHWM:")


def _read(name: str) -> int:
    if not _STATUS.exists():
        return 0
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0
