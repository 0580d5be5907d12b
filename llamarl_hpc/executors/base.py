"""What every executor has: its place, its config, its line to the controller, its trace.

An executor is a loop of "receive a message, do it, answer". Rank 0 (the leader) talks to the
controller; other ranks follow the commands that the leader shares over MPI.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Protocol

from llamarl_hpc.channels.base import ExecutorEnd
from llamarl_hpc.channels.messages import Hello, Stop, ToExecutor
from llamarl_hpc.config.schema import Config
from llamarl_hpc.errors import ChannelError
from llamarl_hpc.observability.trace import Tracer
from llamarl_hpc.placement import World
from llamarl_hpc.run_dir import RunDir

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Context:
    """Handed to an executor by `executors/main.py`. `channel` is None on ranks other than 0."""

    name: str  # "trainer", "generator.1", "reward"
    attempt: int
    instance: int  # counts the starts of this executor within the attempt, from 1
    run: RunDir
    config: Config
    world: World
    device: str
    channel: ExecutorEnd | None
    tracer: Tracer

    @property
    def line(self) -> ExecutorEnd:
        """The leader's line to the controller."""
        assert self.channel is not None, "only rank 0 talks to the controller"
        return self.channel

    def say_hello(self, *, policy_version: int = 0, detail: dict[str, str] | None = None) -> None:
        """All ranks call this once they can work; the leader tells the controller."""
        pids = self.world.gather(os.getpid())
        if self.world.is_leader:
            assert pids is not None
            self.line.send(
                Hello(
                    executor=self.name,
                    attempt=self.attempt,
                    host=self.world.host,
                    pids=pids,
                    policy_version=policy_version,
                    detail=detail or {},
                )
            )

    def receive(self, timeout_s: float) -> ToExecutor | None:
        """The next message, None after `timeout_s`; Stop when the controller fell silent."""
        message = self.line.receive(timeout_s)
        limit = self.config.channels.heartbeat_timeout_s
        if message is None and self.line.controller_silent_s > limit:
            reason = f"the controller was silent for more than {limit:.0f} s"
            log.warning("%s leaves: %s", self.name, reason)
            return Stop(reason=reason)
        return message

    def unexpected(self, message: object) -> ChannelError:
        return ChannelError(f"{self.name} cannot handle a {type(message).__name__} message")


class Executor(Protocol):
    """A role. `run` returns when the controller said Stop."""

    def run(self) -> None: ...
