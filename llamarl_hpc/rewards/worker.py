"""One worker process of the reward pool: calls reward functions, and can be killed at any time.

Started as `python -m llamarl_hpc.rewards.worker FD PARENT`. Reads work from the connection FD and
answers each call as soon as it is done, so that the pool knows which call it was in when it dies.
It ignores SIGTERM, SIGINT and SIGUSR2 (the pool decides), dies with its parent, and cannot take
more memory than it is allowed.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.rewards.base import NamedReward, RewardSpec, build, call

_PR_SET_PDEATHSIG = 1  # prctl(2)

MEMORY = "memory"  # Reply.failed when the memory limit was hit; the worker then leaves


class Setup(msgspec.Struct, frozen=True, array_like=True):
    """First message to a worker."""

    rewards: list[RewardSpec]
    answer: str
    memory_mb: int


class Work(msgspec.Struct, frozen=True, array_like=True):
    """Calls to make, in order; each is (index of the reward, indices of completions)."""

    prompt: str
    columns: dict[str, Any]
    completions: list[str]
    calls: list[tuple[int, list[int]]]


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """Answer to one call, or (with no scores) to Setup."""

    scores: list[float | None]
    failed: str = ""  # MEMORY, or the exception with its place


def main(fd: int, parent: int) -> int:
    _die_with(parent)
    connection = Connection(fd)
    setup = msgspec.msgpack.decode(connection.recv_bytes(), type=Setup)
    try:
        rewards = [build(spec, setup.answer) for spec in setup.rewards]
    except ConfigError as error:
        _send(connection, Reply([], str(error)))
        return 2
    _limit_memory(setup.memory_mb)
    _send(connection, Reply([]))
    decoder = msgspec.msgpack.Decoder(Work)
    while True:
        try:
            work = decoder.decode(connection.recv_bytes())
        except EOFError:
            return 0  # the pool was closed
        for index, chosen in work.calls:
            reply = _score(rewards[index], work, chosen)
            _send(connection, reply)
            if reply.failed == MEMORY:
                return 1


def _score(reward: NamedReward, work: Work, chosen: list[int]) -> Reply:
    completions = [work.completions[i] for i in chosen]
    try:
        return Reply(call(reward, work.prompt, completions, work.columns))
    except MemoryError:
        return Reply([], MEMORY)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return Reply([], f"reward '{reward.name}': {type(error).__name__}: {error} ({where})")


def _send(connection: Connection, reply: Reply) -> None:
    connection.send_bytes(msgspec.msgpack.encode(reply))


def _die_with(parent: int) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def _limit_memory(memory_mb: int) -> None:
    """Address space now, plus `memory_mb`: what the imports took is not the functions' fault."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
