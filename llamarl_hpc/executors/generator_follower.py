"""The other ranks of a generator replica: their part of the model does what the leader says.

    leader (generator.py)   Work, ReceiveWeights, Switch, Stop
    here                    compute | fetch | load | leave

A follower knows no requests and talks to nobody but its leader. While it waits it looks whether
weights under way have come.
"""

from __future__ import annotations

from llamarl_hpc.channels.messages import ReceiveWeights, Stop
from llamarl_hpc.executors.base import Context
from llamarl_hpc.executors.replica_weights import RankWeights, Switch
from llamarl_hpc.generation.native.runner import ModelRunner, Work
from llamarl_hpc.models.load import resolve_model
from llamarl_hpc.placement import lower_priority, row_length
from llamarl_hpc.training.device import own_device
from llamarl_hpc.weight_sync.select import make_receiver


class GeneratorFollower:
    """Any rank of a replica but the first."""

    def __init__(self, context: Context) -> None:
        self.context, self.world = context, context.world
        config = context.config
        self.runner = ModelRunner(
            resolve_model(config.model.path),
            dtype=config.generator.dtype,
            slots=config.generator.max_concurrency,
            max_context=row_length(config),
            device=str(own_device(context.device, context.world)),
            world=context.world,
            int8=config.generator.quantization == "int8",
        )
        self.receiver = make_receiver(
            context.run,
            config,
            context.name,
            context.world,
            context.device,
            parts=self.runner.parts,
        )
        self.weights = RankWeights(self.receiver, context.world)

    def run(self) -> None:
        lower_priority(self.context.config.generator.nice)
        self.context.say_hello()
        while not isinstance(command := self.world.share(meanwhile=self._look), Stop):
            self._obey(command)
        self.receiver.close()

    def _obey(self, command: object) -> None:
        if isinstance(command, Work):
            self._look()
            self.runner.follow(command)
        elif isinstance(command, ReceiveWeights):
            self.weights.start(command)
        elif isinstance(command, Switch):
            if command.take:
                assert self.weights.staged is not None
                self.runner.load_weights(self.weights.staged.tensors())
            self.weights.forget()
        else:
            raise self.context.unexpected(command)

    def _look(self) -> None:
        arrival = self.weights.look()
        if arrival is not None:
            self.world.reply(arrival)
