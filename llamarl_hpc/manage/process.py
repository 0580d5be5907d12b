"""The controller's process, as run.json names it, on this machine."""

from __future__ import annotations

import socket
from typing import Any

from llamarl_hpc.run_dir import RunDir


def is_of_this_host(attempt: dict[str, Any]) -> bool:
    """Whether an attempt of run.json was made by this machine, where processes can be seen."""
    return bool(attempt.get("host") == socket.gethostname())


def is_alive(attempt: dict[str, Any]) -> bool:
    """Whether the controller that wrote this entry of run.json still runs on this machine, and not
    a later process with its number."""
    import psutil  # not needed for runs of other machines, which are most on a login node

    try:
        process = psutil.Process(int(attempt["pid"]))
        is_older = process.create_time() <= float(attempt["started"]) + 1.0
        return is_older and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_running_here(run: RunDir) -> dict[str, Any] | None:
    """The attempt that a process of this machine makes now."""
    last: dict[str, Any] = (run.read_info().get("attempts") or [{}])[-1]
    runs = last.get("outcome") == "running" and is_of_this_host(last) and is_alive(last)
    return last if runs else None
