"""Everything that executors send, and which part of the controller it is for.

Also the two events without a message: an executor is lost, or leaves a request unanswered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from llamarl_hpc.channels.base import ControllerEnd
from llamarl_hpc.channels.messages import (
    CheckpointCopied,
    CheckpointSaved,
    Generated,
    Hello,
    ReferenceSaved,
    Referred,
    Scored,
    ToController,
    Trained,
    WeightsPublished,
    WeightsReceived,
    WeightsRefused,
    WeightsSummed,
)
from llamarl_hpc.controller.bell import Bell
from llamarl_hpc.controller.fleet import Fleet, Member
from llamarl_hpc.controller.rollouts import RolloutFlow
from llamarl_hpc.controller.saving import Saving
from llamarl_hpc.controller.schedule import Replica
from llamarl_hpc.controller.trainer_line import TrainerLine
from llamarl_hpc.controller.weights import WeightFlow
from llamarl_hpc.errors import ChannelError
from llamarl_hpc.observability.progress import Progress


class Inbox:
    """Hands every message to the flow it belongs to, and rings."""

    def __init__(
        self,
        channel: ControllerEnd,
        *,
        bell: Bell,
        fleet: Fleet,
        replicas: Mapping[str, Replica],
        flow: RolloutFlow,
        weights: WeightFlow,
        trainer: TrainerLine,
        saving: Saving,
        progress: Progress,
        reply_timeout_s: float,
    ) -> None:
        self._channel, self._bell, self._fleet, self._replicas = channel, bell, fleet, replicas
        self._flow, self._weights, self._trainer, self._saving = flow, weights, trainer, saving
        self._progress, self._limit_s = progress, reply_timeout_s
        fleet.on_lost = self._on_lost

    async def listen(self) -> None:
        """Runs for ever."""
        while True:
            executor, message = await self._channel.receive()
            if not self._fleet.hear(executor, message):
                assert not isinstance(message, ChannelError)
                await self._deliver(executor, message)
                await self._flow.pump()
                self._bell.ring()

    async def watch_replies(self) -> None:
        """Runs for ever; kills who leaves a request unanswered, although its heart beats."""
        while True:
            await asyncio.sleep(min(5.0, self._limit_s / 2))
            for name in self._fleet.members:
                waited = self._flow.oldest_request_s(name)
                if waited > self._limit_s:
                    self._fleet.fail(name, f"left a request unanswered for {waited:.0f} s")
            for name in self._weights.late(self._limit_s):
                self._fleet.fail(name, f"did not take new weights within {self._limit_s:.0f} s")

    async def _deliver(self, executor: str, message: ToController) -> None:
        if isinstance(message, Generated):
            await self._flow.on_generated(executor, message.groups)
        elif isinstance(message, Scored):
            self._flow.on_scored(message.groups)
        elif isinstance(message, Referred) and executor == "reference":
            self._flow.reference.on_referred(message)
        elif isinstance(message, WeightsReceived):
            self._weights.on_received(executor, message)
        elif isinstance(message, WeightsRefused):
            self._weights.on_refused(executor, message)
        elif isinstance(message, WeightsPublished):
            self._weights.on_published(message)
        elif isinstance(message, WeightsSummed):
            self._weights.on_summed(message)
        elif isinstance(message, Trained | CheckpointCopied | Referred | ReferenceSaved):
            self._trainer.on_answer(message)
        elif isinstance(message, CheckpointSaved):
            self._saving.on_saved(message)
        elif isinstance(message, Hello):
            await self._on_hello(executor)

    async def _on_hello(self, executor: str) -> None:
        self._progress.note(f"{executor} is up on {self._fleet.members[executor].host}")
        if replica := self._replicas.get(executor):
            replica.ready, replica.version, replica.sequences = True, -1, 0
        elif executor == "reward":
            await self._flow.on_reward_ready()
        elif executor == "reference":
            await self._flow.reference.on_ready()
        elif executor == "trainer":
            await self._trainer.load_reference()

    def _on_lost(self, member: Member, reason: str) -> None:
        if replica := self._replicas.get(member.name):
            replica.ready, replica.version = False, -1
            self._flow.on_replica_lost(member.name, reason)
            self._weights.on_lost(member.name)
