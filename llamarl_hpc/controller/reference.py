"""The reference between reward and training: which groups it may see, and what became of them.

With `reference.placement: executor` a scored group passes through here on its way to the buffer:

    reward -> waiting --Refer--> asked --Referred--> buffer
               (for a reference that is not there yet)

With placement `trainer` the trainer is asked for the whole batch just before its step, and the
flow is empty. With `reference.update_steps` = n the reference of step s is the policy as it was
after n * (s // n) steps; a group waits until that one is there.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from llamarl_hpc.batching.buffer import ScoredGroup
from llamarl_hpc.channels.messages import LoadReference, Refer, Referred
from llamarl_hpc.config.schema import Config
from llamarl_hpc.controller.busy import BusyClock
from llamarl_hpc.controller.fleet import Fleet
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.placement import refers_apart
from llamarl_hpc.types import ReferenceItem, ReferenceLogprobs


def reference_step(step: int, update_steps: int) -> int:
    """Steps that the policy had made when it became the reference of step `step`; 0: none."""
    return step // update_steps * update_steps if update_steps else 0


def request(groups: Sequence[ScoredGroup], *, step: int, temperature: float) -> Refer:
    """What the reference that is the policy after `step` steps says about these groups."""
    items = [
        ReferenceItem(
            group_id=group.ticket,
            prompt_ids=group.prompt.token_ids,
            completion_ids=[completion.token_ids for completion in group.completions],
        )
        for group in groups
    ]
    return Refer(step=step, temperature=temperature, items=items)


def with_logprobs(group: ScoredGroup, answer: ReferenceLogprobs) -> ScoredGroup:
    lengths = [len(completion.token_ids) for completion in group.completions]
    assert [len(logprobs) for logprobs in answer.logprobs] == lengths, "not of these completions"
    return msgspec.structs.replace(group, logprobs_reference=answer.logprobs)


class ReferenceModels:
    """The model folders of references that were once the policy, in the run folder."""

    def __init__(self, config: Config, folder: Path, *, step: int) -> None:
        """`step` is that of the state the attempt starts from. Raises ConfigError when its
        reference is missing."""
        self._folder = folder
        self.update_steps = config.reference.update_steps if config.algorithm.beta > 0.0 else 0
        self.step = reference_step(step, self.update_steps)
        if self.step and not self.path(self.step).is_dir():
            raise ConfigError(
                f"the reference of step {step} should be in {self.path(self.step)}, which is not "
                "there; restore it, or set reference.update_steps to 0 to compare with the "
                "first policy"
            )

    def path(self, step: int) -> Path:
        return self._folder / f"step_{step:06d}"

    def is_due(self, step: int) -> bool:
        """After this step the policy becomes the reference."""
        return bool(self.update_steps and step % self.update_steps == 0 and step > self.step)

    def load(self) -> LoadReference | None:
        """For whoever holds the reference and has just started; None: it has the right one."""
        if not self.step:
            return None
        return LoadReference(step=self.step, folder=str(self.path(self.step)))

    def prune(self, checkpoints: Sequence[int]) -> None:
        """Remove what neither this attempt nor a resume from one of these steps can need."""
        needed = {self.step, *(reference_step(step, self.update_steps) for step in checkpoints)}
        for folder in self._folder.glob("step_*"):
            number = folder.name.removeprefix("step_")
            if number.isdigit() and int(number) < min(needed):
                shutil.rmtree(folder, ignore_errors=True)


@dataclass
class _Asked:
    group: ScoredGroup
    asked_at: float = field(default_factory=time.monotonic)


class ReferenceFlow:
    """Scored groups on their way through the reference executor."""

    def __init__(
        self,
        config: Config,
        models: ReferenceModels,
        *,
        fleet: Fleet,
        busy: BusyClock,
        step_of: Callable[[int], int],
        put: Callable[[ScoredGroup], None],
    ) -> None:
        """`step_of`: the step that will consume a ticket, as far as is known. `put` takes a group
        that is done."""
        self.is_on = refers_apart(config)
        self._temperature = config.rollout.temperature
        self._models, self._fleet, self._busy = models, fleet, busy
        self._step_of, self._put = step_of, put
        self._waiting: dict[int, ScoredGroup] = {}
        self._asked: dict[int, _Asked] = {}

    def add(self, group: ScoredGroup) -> None:
        """A scored group; goes on with `pump`."""
        if self.is_on:
            self._waiting[group.ticket] = group
        else:
            self._put(group)

    async def pump(self) -> None:
        """Ask about everything whose reference is there."""
        ready = [t for t in sorted(self._waiting) if self._is_there(t)]
        groups = [self._waiting.pop(ticket) for ticket in ready]
        if groups:
            self._asked |= {group.ticket: _Asked(group) for group in groups}
            await self._send(groups)

    def _is_there(self, ticket: int) -> bool:
        update_steps = self._models.update_steps
        return reference_step(self._step_of(ticket), update_steps) == self._models.step

    async def _send(self, groups: Sequence[ScoredGroup]) -> None:
        self._busy.begin("reference", len(groups))
        message = request(groups, step=self._models.step, temperature=self._temperature)
        await self._fleet.send("reference", message)

    def on_referred(self, message: Referred) -> None:
        for answer in message.groups:
            asked = self._asked.pop(answer.group_id, None)
            if asked is not None:  # else asked again after the executor was lost
                self._busy.end("reference")
                self._put(with_logprobs(asked.group, answer))

    async def on_ready(self) -> None:
        """The executor is up (again): it gets its model and everything that it owes."""
        if (load := self._models.load()) is not None:
            await self._fleet.send("reference", load)
        self._busy.clear("reference")
        for asked in self._asked.values():
            asked.asked_at = time.monotonic()
        if self._asked:
            await self._send([asked.group for asked in self._asked.values()])

    async def on_update(self) -> None:
        """There is a newer reference; nothing that was asked may still want the old one."""
        assert not self._asked, "groups of later steps were compared with an older reference"
        if self.is_on and (load := self._models.load()) is not None:
            await self._fleet.send("reference", load)

    def tickets(self) -> list[int]:
        """Groups that are here."""
        return [*self._waiting, *self._asked]

    def oldest_request_s(self) -> float:
        """Seconds since the oldest unanswered request; 0 if there is none."""
        times = [asked.asked_at for asked in self._asked.values()]
        return time.monotonic() - min(times) if times else 0.0

    def drain(self) -> list[ScoredGroup]:
        """Everything that is here, in ticket order; nothing is left."""
        groups = self._waiting | {ticket: asked.group for ticket, asked in self._asked.items()}
        self._waiting, self._asked = {}, {}
        return [groups[ticket] for ticket in sorted(groups)]
