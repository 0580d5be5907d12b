"""The reference executor: log-probs of scored groups under a frozen policy.

    wait --Refer--> compute --Referred--> wait
    wait --LoadReference--> read a model folder --> wait

Every rank holds the model and computes its share of the groups; the leader receives and shares
each command. Groups that arrive meanwhile wait in the channel and are computed together.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from llamarl_hpc.channels.messages import LoadReference, Refer, Referred, Stop, ToExecutor
from llamarl_hpc.errors import ChannelError
from llamarl_hpc.executors.base import Context
from llamarl_hpc.models.load import resolve_model
from llamarl_hpc.training.device import own_device
from llamarl_hpc.training.reference import Reference


class ReferenceExecutor:
    """Owns the frozen policy."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.world = context.world
        self.reference = make_reference(context)
        self._next: ToExecutor | None = None  # came while others were collected

    def run(self) -> None:
        self.context.say_hello()
        while not isinstance(command := self._next_command(), Stop):
            if isinstance(command, Refer):
                self._refer(command)
            elif isinstance(command, LoadReference):
                self.reference.load(command.step, Path(command.folder))
            else:
                raise self.context.unexpected(command)

    def _next_command(self) -> ToExecutor:
        message: ToExecutor | None = None
        if self.world.is_leader:
            message, self._next = self._next, None
            with self.context.tracer.span("wait", on="controller"):
                self.context.line.set_activity("wait for scored groups")
                while message is None:
                    message = self.context.receive(timeout_s=1.0)
            if isinstance(message, Refer):
                message = self._with_those_behind(message)
        command: ToExecutor = self.world.share(message)
        return command

    def _with_those_behind(self, first: Refer) -> Refer:
        """All requests that have arrived, as one: fewer and fuller micro-batches."""
        items = list(first.items)
        while isinstance(message := self.context.receive(0.0), Refer):
            items += message.items
        self._next = message
        return msgspec.structs.replace(first, items=items)

    def _refer(self, command: Refer) -> None:
        if self.world.is_leader:
            self.context.line.set_activity(f"compute log-probs of {len(command.items)} groups")
        with self.context.tracer.span("refer", groups=len(command.items)):
            answer(self.context, self.reference, command)


def make_reference(context: Context) -> Reference:
    """The reference as the config wants it, on this rank's device."""
    config = context.config
    return Reference(
        config,
        context.world,
        resolve_model(config.reference.path or config.model.path),
        device=own_device(context.device, context.world),
        offload=config.reference.offload and config.reference.placement == "trainer",
    )


def answer(context: Context, reference: Reference, command: Refer) -> None:
    """Compute what is asked for; the leader sends it. Raises ChannelError when the reference is
    another one than the controller takes it for."""
    if command.step != reference.step:
        raise ChannelError(
            f"asked for log-probs of the policy after {command.step} steps, but the reference is "
            f"the one after {reference.step}"
        )
    start = time.monotonic()
    groups = reference.logprobs(command.items, command.temperature)
    if context.world.is_leader:
        context.line.send(
            Referred(step=command.step, groups=groups, seconds=time.monotonic() - start)
        )
