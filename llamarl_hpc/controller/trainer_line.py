"""The controller's line to the trainer: one command at a time, and one answer with a deadline.

The reference of the KL term, where it lives on the trainer's ranks, is asked over the same line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from llamarl_hpc.batching.buffer import ScoredGroup
from llamarl_hpc.channels.messages import (
    CheckpointCopied,
    ReferenceSaved,
    Referred,
    SaveReference,
    ToExecutor,
    Trained,
)
from llamarl_hpc.config.schema import Config
from llamarl_hpc.controller.bell import Bell
from llamarl_hpc.controller.fleet import Fleet
from llamarl_hpc.controller.reference import ReferenceModels, request, with_logprobs
from llamarl_hpc.errors import ExecutorFailed

Answer = TypeVar("Answer", Trained, CheckpointCopied, Referred, ReferenceSaved)


class TrainerLine:
    """Asks, and waits. `refers_here`: the trainer's ranks hold the reference."""

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        bell: Bell,
        references: ReferenceModels,
        *,
        refers_here: bool,
    ) -> None:
        self._fleet, self._bell, self._references = fleet, bell, references
        self._limit_s = config.channels.reply_timeout_s
        self._temperature = config.rollout.temperature
        self._refers_here = refers_here
        self._answer: Trained | CheckpointCopied | Referred | ReferenceSaved | None = None

    def on_answer(self, message: Trained | CheckpointCopied | Referred | ReferenceSaved) -> None:
        """It came."""
        self._answer = message

    async def ask(self, message: ToExecutor, kind: type[Answer]) -> Answer:
        """Send a command and wait for its answer. Raises ExecutorFailed, which names the trainer,
        after `channels.reply_timeout_s`."""
        self._answer = None
        await self._fleet.send("trainer", message)
        await self._bell.until(lambda: isinstance(self._answer, kind), timeout_s=self._limit_s)
        if not isinstance(self._answer, kind):
            raise ExecutorFailed(
                "trainer",
                0,
                self._fleet.members["trainer"].host,
                f"did not answer {type(message).__name__} within {self._limit_s:.0f} s "
                "(channels.reply_timeout_s)",
            )
        return self._answer

    async def refer(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """The groups with what the trainer's reference says of them, if it has one."""
        if not self._refers_here:
            return list(groups)
        message = request(groups, step=self._references.step, temperature=self._temperature)
        answer = await self.ask(message, Referred)
        return [with_logprobs(*pair) for pair in zip(groups, answer.groups, strict=True)]

    async def save_reference(self, step: int) -> None:
        """The policy as it is now, into a folder: it becomes the reference of `step`."""
        folder = self._references.path(step)
        await self.ask(SaveReference(step=step, folder=str(folder)), ReferenceSaved)
        self._references.step = step

    async def load_reference(self) -> None:
        """Make the trainer's reference, if it has one, the one of this step."""
        load = self._references.load()
        if load is not None and self._refers_here:
            await self._fleet.send("trainer", load)
