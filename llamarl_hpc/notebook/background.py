"""A run on this machine that goes on without the notebook: `llamarl-hpc resume RUN` in a session of
its own, which neither a restart of the kernel nor an interrupt reaches.

`background.json` in the run folder names the process until it has written down its attempt, so
that every kernel knows of it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.launch.allocation import outside_allocation
from llamarl_hpc.manage.process import is_alive
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.storage.atomic import write_json

if TYPE_CHECKING:
    from llamarl_hpc.config.schema import Config
    from llamarl_hpc.launch.local import Prepared

_children: list[subprocess.Popen[bytes]] = []  # of this kernel, which must take their exit codes


def check_here(config: Config) -> Prepared:
    """Check everything for a run on this machine, a Slurm job around the kernel left aside. Raises
    ConfigError."""
    from llamarl_hpc.launch.allocation import outside_allocation
    from llamarl_hpc.launch.local import prepare
    from llamarl_hpc.launch.starter import find_starter

    find_starter(config, outside_allocation(os.environ))
    return prepare(config, elsewhere=True)


def start_background(run: RunDir, overrides: Sequence[str] = ()) -> None:
    """Start the run's next attempt. What it prints goes to `background.log`."""
    changes = [word for text in overrides for word in ("--set", text)]
    program = [sys.executable, "-u", "-m", "llamarl_hpc.cli.main"]
    with run.background_log.open("ab") as log:
        process = subprocess.Popen(
            [*program, "resume", str(run.path), "--plain", *changes],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=outside_allocation(os.environ),  # here, also when the kernel is in a Slurm job
            start_new_session=True,
        )
    _children.append(process)
    entry = {"pid": process.pid, "host": socket.gethostname(), "started": time.time()}
    write_json(run.background, entry)


def begin_or_end(run: RunDir) -> tuple[str, str] | None:
    """(state, reason) of a process that was started and has made no attempt yet: `starting`, or
    `failed` with its last words. None when the run folder itself says how things are."""
    for child in _children:
        child.poll()
    entry = _entry(run)
    last: dict[str, Any] = (run.read_info().get("attempts") or [{}])[-1]
    if entry is None or float(last.get("started", 0.0)) >= entry["started"]:
        return None
    if entry["host"] != socket.gethostname():
        return "starting", f"as process {entry['pid']} on {entry['host']}"
    if is_alive(entry):
        return "starting", ""
    return "failed", _last_words(run)


def end_before_attempt(run: RunDir, *, timeout_s: float = 30.0) -> bool:
    """Kill a process that has not begun its attempt; whether there was one. Raises ConfigError when
    it cannot be reached, or does not go."""
    state = begin_or_end(run)
    entry = _entry(run)
    if state is None or state[0] != "starting" or entry is None:
        return False
    if entry["host"] != socket.gethostname():
        raise ConfigError(
            f"the run is being started by process {entry['pid']} on {entry['host']}; cancel it "
            "there, or in a minute"
        )
    os.kill(entry["pid"], signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while (state := begin_or_end(run)) is not None and state[0] == "starting":
        if time.monotonic() > deadline:
            raise ConfigError(
                f"process {entry['pid']} has not ended {timeout_s:.0f} s after it was told to; "
                f"see {run.background_log}"
            )
        time.sleep(0.05)
    run.background.unlink(missing_ok=True)
    return True


def _entry(run: RunDir) -> dict[str, Any] | None:
    try:
        entry: dict[str, Any] = json.loads(run.background.read_text())
    except FileNotFoundError:
        return None
    return entry


def _last_words(run: RunDir) -> str:
    lines = run.background_log.read_text(errors="replace").splitlines()
    said = [line for line in lines if line.startswith("error:")] or lines[-1:]
    return said[-1].removeprefix("error: ") if said else "its process ended without a word"
