"""Processes that a command starts on this machine, and never leaves behind.

They have a session of their own, so a Ctrl-C in the terminal reaches the command alone. Whatever
makes it leave the `with` (it is done, an error, a signal: see cli/main.py) kills them with all that
they have started; when it is killed itself, the kernel does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from llamarl_hpc.controller.supervisor import die_with_parent, kill_all
from llamarl_hpc.launch.steps import MpiExec


def start(
    argv: Sequence[str], *, end_with: signal.Signals = signal.SIGKILL, **settings: Any
) -> subprocess.Popen[bytes]:
    """A process that gets `end_with` when this one dies. `settings`: those of Popen."""
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=die_with_parent(end_with),
        **settings,
    )


@contextmanager
def child(argv: Sequence[str], **settings: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = start(argv, **settings)
    try:
        yield process
    finally:
        if process.poll() is None:
            kill_all([process.pid])
            process.wait()


def run_ranks(
    num_ranks: int,
    module: str,
    task: str,
    *,
    env: Mapping[str, str],
    timeout_s: float | None = None,
) -> tuple[int, str]:
    """MPI ranks of `python -m module task`, to their end: exit code and last line on stderr.

    Raises subprocess.TimeoutExpired.
    """
    mpiexec = MpiExec.find().argv(num_ranks, as_root=os.geteuid() == 0)
    argv = [*mpiexec, sys.executable, "-m", module, task]
    with (
        tempfile.TemporaryFile("w+") as errors,
        child(argv, env=env, stdout=subprocess.DEVNULL, stderr=errors) as process,
    ):
        code = process.wait(timeout_s)
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    return code, lines[-1] if lines else "it said nothing"
