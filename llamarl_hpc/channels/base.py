"""The two ends of a channel; `zmq/` implements them, tests put fakes in their place.

    controller  --(Generate, Score, Train, PublishWeights, ...)-->  rank 0 of an executor
    controller  <--(Hello, Heartbeat, Generated, Trained, ...)----  rank 0 of an executor

Every start of an executor has an *instance*, a short text that no other start in the run has
("1", "2", ...). The supervisor chooses it, announces it with `ControllerEnd.expect` and passes it
to the process it starts. What an instance sends that is not the expected one is refused, so a
replica that was given up cannot speak for its successor.
"""

from __future__ import annotations

from typing import Protocol

from llamarl_hpc.channels.messages import ToController, ToExecutor
from llamarl_hpc.errors import ChannelError


class ControllerEnd(Protocol):
    """Used from one asyncio loop."""

    def expect(self, executor: str, instance: str) -> None:
        """From now on `executor` ("generator.1") is `instance`; an older one is not heard."""

    def forget(self, executor: str) -> None:
        """Nothing more is accepted from, or sent to, this executor."""

    async def receive(self) -> tuple[str, ToController | ChannelError]:
        """The next message and the executor it came from. Cancelling loses no message.

        Never raises for what a peer did. When a message of an expected instance is malformed, or
        shows that one before it was lost, a ChannelError takes its place, once: that instance is
        not heard any more, and the executor has failed. Waits without limit; see `silent_s`.
        """

    async def send(self, executor: str, message: ToExecutor) -> None:
        """Hand over a message.

        Raises NotConnectedError: no Hello yet, or gone. Any other ChannelError is a message that
        cannot travel at all.
        """

    def silent_s(self, executor: str) -> float:
        """Seconds since this executor was last heard, since `expect` if it never was."""

    async def close(self) -> None:
        """Send what is queued (a few seconds at most), then let go of everything. Idempotent."""


class ExecutorEnd(Protocol):
    """Used from any thread of an executor's rank 0. Heartbeats are sent behind the scenes."""

    def send(self, message: ToController) -> None:
        """Queue a message; arrays may be changed afterwards. Raises ChannelError when broken."""

    def receive(self, timeout_s: float) -> ToExecutor | None:
        """The next message (never a Ping), None after `timeout_s` seconds; 0 does not wait.

        Raises ChannelError when a message was malformed or lost: the executor must end.
        """

    def set_activity(self, activity: str) -> None:
        """What the heartbeats say the main thread is doing: "decode", "train step 12", ..."""

    @property
    def signal_fd(self) -> int:
        """For `signal.set_wakeup_fd`: the heartbeats name the last signal, the next one at once."""

    @property
    def controller_silent_s(self) -> float:
        """Seconds since anything was heard from the controller."""

    def close(self) -> None:
        """Send what is queued (a few seconds at most), then let go of everything. Idempotent."""
