"""Whole runs of a tiny random model through the command line, and the processes to poke at."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from tiny_model import write_tiny_model

COMMAND = [sys.executable, "-m", "llamarl_hpc.cli.main"]
_MARK = "LLAMARL_TEST_MARK"  # in the environment of everything that a run starts

# Digits are what a random model can learn to write. While the file `slow` lies beside this one,
# a group takes 0.2 s to score, so that a test has time to interfere.
_REWARD = """
import pathlib, time

SLOW = pathlib.Path(__file__).with_name("slow")

def digits(prompts, completions, **columns):
    if SLOW.exists():
        time.sleep(0.2)
    return [sum(c in "2468" for c in text) / 4 for text in completions]
"""


def write_run_files(folder: Path, **changes: Any) -> Path:
    """Model, data, reward function and config below `folder`; returns the config.

    `changes` are merged into the config's blocks: `trainer={"max_steps": 3}`.
    """
    write_tiny_model(folder / "model", initializer_range=0.08)
    (folder / "digits.py").write_text(_REWARD)
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config: dict[str, Any] = {
        "name": "tiny",
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "sums.jsonl")},
        "rollout": {
            "num_generations": 4,
            "prompts_per_step": 4,
            "max_prompt_length": 64,
            "max_completion_length": 16,
            "temperature": 1.1,
        },
        "rewards": [
            {"kind": "python", "function": f"{folder / 'digits.py'}:digits"},
            {"kind": "math_answer", "weight": 0.5},
        ],
        "algorithm": {"max_staleness": 0},
        "trainer": {
            "learning_rate": 1e-3,
            "micro_batch_tokens": 256,
            "max_steps": 6,
            "save_steps": 2,
        },
        "evaluation": {"num_prompts": 8},
        "generator": {"replicas": 1},
        "channels": {"heartbeat_s": 0.25, "heartbeat_timeout_s": 20.0},
    }
    for block, values in changes.items():
        config[block] = {**config.get(block, {}), **values}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


@dataclass(frozen=True)
class Answer:
    """How a command ended."""

    code: int
    out: str
    err: str


def cli(*arguments: object, timeout_s: float = 120.0, **environment: str) -> Answer:
    """Run `llamarl-hpc ARGUMENTS` to its end."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=_environment() | environment,
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


class LiveRun:
    """A `run` or `resume` that goes on while the test looks at it, or kills parts of it."""

    def __init__(
        self,
        *arguments: object,
        folder: Path,
        logs: Path | None = None,
        stdout: int | None = None,
    ) -> None:
        """`folder` is the run's; what the command prints goes to files in `logs` (or `stdout`)."""
        self.folder = folder
        self.mark = secrets.token_hex(8)
        self._lines_before = len(lines_of(folder))
        self._logs = (logs or folder.parent) / f"{folder.name}-{self.mark}.out"
        self._errors = self._logs.with_suffix(".err")
        with self._logs.open("w") as out, self._errors.open("w") as err:
            self.process = subprocess.Popen(
                [*COMMAND, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=out if stdout is None else stdout,
                stderr=err,
                env=_environment() | {_MARK: self.mark},
                start_new_session=True,
            )

    # ------------------------------------------------------------------ watching

    @property
    def out(self) -> str:
        return self._logs.read_text()

    @property
    def err(self) -> str:
        return self._errors.read_text()

    def wait(self, what: str, condition: Callable[[], bool], timeout_s: float = 90.0) -> float:
        """Wait until `condition` holds; returns the seconds it took."""
        start = time.monotonic()
        while not condition():
            if self.process.poll() is not None and not condition():
                raise AssertionError(f"the run ended before {what}:\n{self.out}\n{self.err}")
            if time.monotonic() - start > timeout_s:
                raise AssertionError(f"no {what} in {timeout_s} s:\n{self.out}\n{self.err}")
            time.sleep(0.02)
        return time.monotonic() - start

    def wait_for_step(self, number: int) -> None:
        """Until this attempt has made the optimizer step that is `number` of the run, from 1."""
        self.wait(f"step {number}", lambda: self._last_step() >= number)

    def _last_step(self) -> int:
        lines = lines_of(self.folder)[self._lines_before :]
        return max((line["step"] + 1 for line in lines if "step" in line), default=0)

    def wait_for_text(self, text: str, times: int = 1) -> float:
        return self.wait(repr(text), lambda: self.out.count(text) >= times)

    # ------------------------------------------------------------------ processes

    def processes(self) -> list[psutil.Process]:
        """Everything alive that this run started, itself included."""
        return [p for p in psutil.process_iter() if _has_mark(p, self.mark)]

    def ranks(self, executor: str) -> list[int]:
        """Pids of the ranks of an executor."""
        return [pid for pid, argv in self._steps(executor) if argv[1:2] == ["-m"]]

    def mpiexec(self, executor: str) -> int:
        """Pid of what the controller started for it, whatever its MPI calls that."""
        children = {child.pid for child in psutil.Process(self.process.pid).children()}
        (pid,) = (pid for pid, _ in self._steps(executor) if pid in children)
        return pid

    def _steps(self, executor: str) -> Iterator[tuple[int, list[str]]]:
        for process in self.processes():
            argv = _argv(process)
            if f"--executor={executor}" in argv:
                yield process.pid, argv

    def kill(self, executor: str, number: int = signal.SIGKILL) -> None:
        (pid, *_) = self.ranks(executor)
        os.kill(pid, number)

    # ------------------------------------------------------------------ the end

    def finish(self, timeout_s: float = 120.0) -> Answer:
        """Wait for the end. Nothing that it started may outlive it."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"the run does not end:\n{self.out}\n{self.err}") from error
        assert self.orphans() == []
        return Answer(code, self.out, self.err)

    def orphans(self, within_s: float = 0.5) -> list[str]:
        """Command lines of what is still alive `within_s` after the end."""
        deadline = time.monotonic() + within_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [" ".join(_argv(process)) for process in left]

    def destroy(self) -> None:
        """After a failed test: leave nothing behind."""
        for process in self.processes():
            if process.is_running():
                process.kill()
        self.process.wait()


Start = Callable[..., LiveRun]  # the fixture `start`


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl, whole lines only."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def losses_of(folder: Path) -> list[str]:
    """Loss of every step, exactly; of a step done twice, by the later attempt."""
    by_step = {line["step"]: line["loss"].hex() for line in lines_of(folder) if "step" in line}
    assert list(by_step) == list(range(len(by_step)))
    return list(by_step.values())


def attempts_of(folder: Path) -> list[dict[str, Any]]:
    attempts: list[dict[str, Any]] = json.loads((folder / "run.json").read_text())["attempts"]
    return attempts


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        alive = process.status() != psutil.STATUS_ZOMBIE
        return alive and process.environ().get(_MARK) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _argv(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() or [""]
    except psutil.NoSuchProcess:
        return [""]
