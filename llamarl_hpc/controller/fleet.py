"""The executors of this attempt: who is up, who fell silent, who is started again.

Between the supervisor (processes) and the channel (messages). A generator replica or the reward
executor that dies is started again; the trainer's death ends the run. Heartbeats are judged by
this host's monotonic clock and by rising sequence numbers, never by the sender's clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from llamarl_hpc.channels.base import ControllerEnd
from llamarl_hpc.channels.messages import Heartbeat, Hello, Stop, ToController, ToExecutor
from llamarl_hpc.config.schema import Config
from llamarl_hpc.controller.bell import Bell
from llamarl_hpc.controller.supervisor import StepExit, Supervisor
from llamarl_hpc.errors import (
    ChannelError,
    ConfigError,
    ExecutorFailed,
    LlamarlError,
    NotConnectedError,
)
from llamarl_hpc.placement import executor_names, role_of

log = logging.getLogger(__name__)


@dataclass
class Member:
    """What is known of one executor."""

    name: str
    ready: bool = False  # said hello in its current instance
    host: str = ""
    pids: list[int] = field(default_factory=list)
    detail: dict[str, str] = field(default_factory=dict)
    activity: str = "starting"
    restarts: int = 0
    lost: bool = False  # died more often than allowed; the run goes on without it
    fault: str = ""  # why we killed its current instance
    report_by: float = math.inf  # monotonic: when it must have said hello, if it starts again


async def _never() -> bool:
    return False


class Fleet:
    """`on_lost` tells the controller that a member went away, before it is started again, and
    `is_ending` whether that has any use; `on_signal` that a rank was signalled."""

    def __init__(
        self, config: Config, channel: ControllerEnd, supervisor: Supervisor, bell: Bell
    ) -> None:
        self.config, self.channel, self.supervisor, self.bell = config, channel, supervisor, bell
        self.members = {name: Member(name) for name in executor_names(config)}
        self.on_lost: Callable[[Member, str], None] = lambda member, reason: None
        self.on_signal: Callable[[str, str], None] = lambda executor, signal: None
        self.is_ending: Callable[[], Awaitable[bool]] = _never

    async def start(self, is_stopped: Callable[[], bool]) -> None:
        """Start every executor and wait for all hellos, or name those that are missing."""
        for name in self.members:
            await self._start(name)
        limit = self.config.channels.startup_timeout_s
        up = await self.bell.until(lambda: not self._missing() or is_stopped(), timeout_s=limit)
        if not up:
            first, *others = self._missing()
            reason = f"did not report within {limit:.0f} s (channels.startup_timeout_s)"
            reason += f"; nor did {', '.join(others)}" if others else ""
            words = self.supervisor.last_words(first)
            raise ExecutorFailed(first, 0, socket.gethostname(), reason, words)

    async def _start(self, name: str) -> None:
        """The instance is announced before it runs; what an older one still sends is refused."""
        self.channel.expect(name, str(self.supervisor.starts(name) + 1))
        await self.supervisor.start(name)

    def _missing(self) -> list[str]:
        return [m.name for m in self.members.values() if not m.ready and not m.lost]

    async def send(self, executor: str, message: ToExecutor) -> None:
        """To a live executor; a message to a dead one is dropped, its death is reported anyway."""
        if self.members[executor].ready:
            with contextlib.suppress(NotConnectedError):
                await self.channel.send(executor, message)

    def hear(self, executor: str, message: ToController | ChannelError) -> bool:
        """Note a sign of life (or of sickness). True when there is nothing else to do about it."""
        member = self.members[executor]
        if isinstance(message, ChannelError):
            self._kill(member, str(message))
            return True
        if isinstance(message, Heartbeat):
            member.activity = message.activity
            if message.signal:
                self.on_signal(executor, message.signal)
            return True
        if isinstance(message, Hello):
            member.ready, member.host, member.pids = True, message.host, message.pids
            member.report_by = math.inf
            member.detail = message.detail
            self.supervisor.introduce(executor, message.pids, message.host)
        return False

    # ------------------------------------------------------------------ deaths

    async def watch_exits(self) -> None:
        """Runs for ever: handles the end of every step."""
        while True:
            await self._handle_exit(await self.supervisor.exits.get())

    async def _handle_exit(self, end: StepExit) -> None:
        member = self.members[end.executor]
        error = self._diagnose(member, end)
        if isinstance(error, ConfigError) or role_of(member.name) == "trainer":
            raise error
        reason = f"{member.name} lost: {str(error).splitlines()[0]}"
        member.ready, member.activity = False, "starting again"
        self.channel.forget(member.name)
        self.on_lost(member, reason)
        if await self.is_ending():
            log.warning("%s; the attempt is about to end", reason)
            member.lost, member.activity = True, "lost"
        elif member.restarts >= self.config.launch.max_restarts:
            self._give_up(member, error, reason)
        else:
            member.restarts += 1
            log.warning("%s; starting it again (%d)", reason, member.restarts)
            member.report_by = time.monotonic() + self.config.channels.startup_timeout_s
            await self._start(member.name)
        self.bell.ring()

    def _diagnose(self, member: Member, end: StepExit) -> LlamarlError:
        """What ended it: its own account, unless we killed it for a reason of ours."""
        error = self.supervisor.diagnose(end)
        if member.fault and isinstance(error, ExecutorFailed):
            reason, member.fault = f"killed: {member.fault}", ""
            return ExecutorFailed(error.executor, error.rank, error.host, reason, error.detail)
        return error

    def _give_up(self, member: Member, error: Exception, reason: str) -> None:
        """Go on without a replica as long as another one lives; nothing else can be spared."""
        member.lost, member.activity = True, "lost"
        others = [
            m
            for m in self.members.values()
            if role_of(m.name) == role_of(member.name) and not m.lost
        ]
        if not others:
            raise error
        log.error("%s; it died too often and the run goes on without it", reason)

    # ------------------------------------------------------------------ heartbeats

    async def watch_heartbeats(self) -> None:
        """Runs for ever: kills an executor that stopped answering; its exit is then handled."""
        channels = self.config.channels
        looked_at = time.monotonic()
        while True:
            stood_still_s = time.monotonic() - looked_at - channels.heartbeat_s
            looked_at = time.monotonic()
            if stood_still_s > channels.heartbeat_timeout_s:  # nobody else is to blame
                log.warning("the controller itself stood still for %.0f s", stood_still_s)
            else:
                for member in self.members.values():
                    if reason := self._silence(member):
                        self._kill(member, reason)
            await asyncio.sleep(channels.heartbeat_s)

    def _silence(self, member: Member) -> str:
        """Why it is taken for dead; empty when it is not."""
        channels = self.config.channels
        if member.ready:
            silent_s = self.channel.silent_s(member.name)
            is_dead = silent_s > channels.heartbeat_timeout_s
            return f"no heartbeat for {silent_s:.0f} s" if is_dead else ""
        if time.monotonic() <= member.report_by:
            return ""
        limit = channels.startup_timeout_s
        return f"did not report within {limit:.0f} s (channels.startup_timeout_s)"

    def _kill(self, member: Member, reason: str) -> None:
        log.info("%s on %s is killed: %s", member.name, member.host, reason)
        member.ready, member.fault, member.report_by = False, reason, math.inf
        self.supervisor.kill(member.name)

    def fail(self, executor: str, reason: str) -> None:
        """End an executor that does not do what it was asked; a trainer ends the run."""
        member = self.members[executor]
        if member.ready:
            self._kill(member, reason)

    # ------------------------------------------------------------------ the end

    async def stop(self, reason: str, grace_s: float) -> None:
        """Ask everybody to leave, then make sure that they have left."""
        for member in self.members.values():
            if member.ready:
                await self.send(member.name, Stop(reason=reason))
            else:  # it is starting, and listens to nobody yet
                self.supervisor.kill(member.name)
        await self.supervisor.stop_all(grace_s)
