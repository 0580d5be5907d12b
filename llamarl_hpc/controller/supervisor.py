"""Starts job steps, watches them, ends them. Knows processes, not what they do.

A step is one `mpiexec` or `srun` with the ranks of one executor. Its end is seen as soon as that
process ends (milliseconds for a killed rank: MPI takes the whole world down). Every step runs in a
session of its own, so a Ctrl-C in the terminal reaches only the controller, which then stops the
steps in order; a controller that is killed takes its steps along (parent-death signal, and a
heartbeat on the executors' side).
"""

from __future__ import annotations

import asyncio
import ctypes
import re
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import psutil

from llamarl_hpc.errors import ConfigError, ExecutorFailed, LlamarlError
from llamarl_hpc.executors.failure import FailureReport
from llamarl_hpc.run_dir import RunDir

_PR_SET_PDEATHSIG = 1
_TAIL_LINES = 20
_END_S = 15.0  # for a launcher that was told to end its ranks
# "PID 1234 RUNNING AT host" (Hydra), "process rank 2 with PID 1234 on node host" (Open MPI)
_DEAD_PID = re.compile(r"\bPID (\d+)\b")


@dataclass(frozen=True, kw_only=True)
class StepCommand:
    """What to start: arguments, and the whole environment of the step."""

    argv: list[str]
    env: dict[str, str]
    end_with: signal.Signals = signal.SIGKILL  # what makes it end its ranks at once, and itself


class Launcher(Protocol):
    def command(self, executor: str, instance: int) -> StepCommand:
        """How to start this executor for the `instance`-th time in this attempt."""


@dataclass(frozen=True, kw_only=True)
class StepExit:
    """A step ended. `returncode` is negative for a signal to mpiexec itself."""

    executor: str
    instance: int
    returncode: int
    pids: Sequence[int]  # of its ranks, by rank; empty if it never said hello
    host: str


@dataclass
class _Step:
    executor: str
    instance: int
    process: asyncio.subprocess.Process
    end_with: signal.Signals
    pids: Sequence[int] = ()  # of the ranks, by rank, once they said hello
    host: str = ""


class Supervisor:
    """`exits` delivers the end of every step that was not asked to end."""

    def __init__(self, run: RunDir, attempt: int, launcher: Launcher) -> None:
        self.run, self.attempt, self.launcher = run, attempt, launcher
        self.exits: asyncio.Queue[StepExit] = asyncio.Queue()
        self._steps: dict[str, _Step] = {}
        self._starts: dict[str, int] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def start(self, executor: str) -> int:
        """Start all ranks of `executor`; returns the instance number, from 1."""
        instance = self._starts.get(executor, 0) + 1
        command = self.launcher.command(executor, instance)
        with self._launch_log(executor).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command.argv,
                env=command.env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(command.end_with),
            )
        self._starts[executor] = instance
        step = _Step(executor, instance, process, command.end_with, host=socket.gethostname())
        self._steps[executor] = step
        watcher = asyncio.create_task(self._watch(step))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        return instance

    def starts(self, executor: str) -> int:
        """How often `executor` was started in this attempt."""
        return self._starts.get(executor, 0)

    def is_running(self, executor: str) -> bool:
        return executor in self._steps

    def introduce(self, executor: str, pids: Sequence[int], host: str) -> None:
        """The ranks said hello: remember who they are, for messages and for killing."""
        if step := self._steps.get(executor):
            step.pids, step.host = pids, host

    async def _watch(self, step: _Step) -> None:
        returncode = await step.process.wait()
        if self._steps.get(step.executor) is step:
            del self._steps[step.executor]
        if not self._stopping:
            # Descendants that outlive mpiexec (it was killed) would hold memory and cores.
            kill_all(step.pids if step.host == socket.gethostname() else ())
            await self.exits.put(
                StepExit(
                    executor=step.executor,
                    instance=step.instance,
                    returncode=returncode,
                    pids=step.pids,
                    host=step.host,
                )
            )

    # ------------------------------------------------------------------ ending

    def kill(self, executor: str) -> None:
        """End a step that does not answer; its exit is reported like any other."""
        if step := self._steps.get(executor):
            self._end(step)

    def _end(self, step: _Step) -> None:
        """A launcher with ranks on other hosts must end them itself; it gets a while to do so."""
        if step.end_with != signal.SIGKILL and step.process.returncode is None:
            step.process.send_signal(step.end_with)
            asyncio.get_running_loop().call_later(_END_S, self._kill_left, step)
        else:
            self._kill_left(step)

    def _kill_left(self, step: _Step) -> None:
        if step.process.returncode is None:
            kill_all([step.process.pid])

    async def stop_all(self, grace_s: float) -> None:
        """Wait for the steps to end by themselves, then kill what is left."""
        self._stopping = True
        waits = [asyncio.create_task(s.process.wait()) for s in self._steps.values()]
        if waits:
            await asyncio.wait(waits, timeout=grace_s)
        for step in list(self._steps.values()):
            self._end(step)
        for watcher in list(self._watchers):
            await watcher

    # ------------------------------------------------------------------ what went wrong

    def diagnose(self, end: StepExit) -> LlamarlError:
        """The error that tells a person what happened to a dead step: rank, host, last words."""
        if report := self._failure_report(end):
            if report.user_error:
                return ConfigError(report.reason)
            words = _tail_text(self.run.log(self.attempt, end.executor, report.rank))
            return ExecutorFailed(end.executor, report.rank, report.host, report.reason, words)
        launch_tail = _tail_text(self._launch_log(end.executor))
        dead = [int(pid) for pid in _DEAD_PID.findall(launch_tail)]
        rank = next((end.pids.index(pid) for pid in dead if pid in end.pids), 0)
        words = self.last_words(end.executor, rank)
        what = "died" if end.returncode else "left by itself"
        reason = f"{what} ({_describe(end.returncode)})"
        return ExecutorFailed(end.executor, rank, end.host, reason, words)

    def last_words(self, executor: str, rank: int = 0) -> str:
        """The end of a rank's log, or of its launcher's while it has none."""
        log = self.run.log(self.attempt, executor, rank)
        return _tail_text(log) or _tail_text(self._launch_log(executor))

    def _failure_report(self, end: StepExit) -> FailureReport | None:
        """What the first failing rank wrote down before it went (see executors/main.py)."""
        folder = self.run.attempt(self.attempt)
        for path in sorted(folder.glob(f"{end.executor}.*.failure.json")):
            report = msgspec.json.decode(path.read_bytes(), type=FailureReport)
            if report.instance == end.instance:
                return report
        return None

    def _launch_log(self, executor: str) -> Path:
        return self.run.attempt(self.attempt) / f"{executor}.launch.log"


def _describe(returncode: int) -> str:
    number = -returncode if returncode < 0 else returncode - 128 if returncode > 128 else returncode
    if returncode < 0 or returncode > 128 or returncode == signal.SIGKILL:
        try:
            return f"signal {signal.Signals(number).name}"
        except ValueError:
            return f"exit code {returncode}"
    return f"exit code {returncode}"


def _tail_text(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(lines[-_TAIL_LINES:])


def kill_all(pids: Sequence[int]) -> None:
    """SIGKILL to these processes and all their descendants."""
    for pid in pids:
        try:
            process = psutil.Process(pid)
            family = [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        for member in family:
            try:
                member.kill()
            except psutil.NoSuchProcess:
                continue


def die_with_parent(number: signal.Signals) -> Callable[[], None] | None:
    """For a child to call before it becomes the step; all but the call itself is done here.
    `number`: what ends the ranks, too, which ignore whatever can be ignored."""
    if sys.platform != "linux":
        return None
    return partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, number)
