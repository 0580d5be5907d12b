"""A generator replica: one engine, fed by the controller, its weights by the trainer.

One loop does everything in turn, so no step ever sees half-loaded weights:

    messages -> (verified weights? switch) -> one decode step -> finished groups to the controller

Without in-flight updates a switch waits until nothing is running; queued groups wait for it and
then start on the new weights. With in-flight updates it happens between two decode steps.

This is rank 0. Other ranks of the replica follow what the engine and the weights tell them
(`generator_follower.py`).
"""

from __future__ import annotations

import logging
import time

from llamarl_hpc.channels.messages import (
    Generate,
    Generated,
    ReceiveWeights,
    Stop,
    ToExecutor,
    WeightsReceived,
    WeightsRefused,
)
from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.executors.base import Context
from llamarl_hpc.executors.replica_weights import ReplicaWeights
from llamarl_hpc.generation.base import GenerationEngine
from llamarl_hpc.generation.native.engine import NativeEngine
from llamarl_hpc.models.load import resolve_model
from llamarl_hpc.placement import lower_priority, row_length
from llamarl_hpc.training.device import own_device
from llamarl_hpc.weight_sync.base import StagedWeights
from llamarl_hpc.weight_sync.select import make_receiver

log = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.25  # for the next message when there is nothing to decode
_POLL_WAIT_S = 0.005  # for weights that are under way when there is nothing to decode


class GeneratorExecutor:
    """Owns the engine and the receiver of one replica."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.engine = self._make_engine()
        self.receiver = make_receiver(
            context.run,
            context.config,
            context.name,
            context.world,
            context.device,
            parts=self.engine.parts(),
        )
        self.weights = ReplicaWeights(self.receiver, context.world)
        self.in_flight = context.config.algorithm.in_flight_weight_updates
        self.request: ReceiveWeights | None = None  # weights under way
        self.requested_at = 0.0
        self.staged: StagedWeights | None = None  # verified, waiting for the switch
        self.stopped: Stop | None = None

    def _make_engine(self) -> GenerationEngine:
        config = self.context.config
        return NativeEngine(
            resolve_model(config.model.path),
            dtype=config.generator.dtype,
            max_concurrency=config.generator.max_concurrency,
            prefill_tokens=config.generator.prefill_tokens,
            max_context=row_length(config),
            device=str(own_device(self.context.device, self.context.world)),
            recompute_kv_cache=config.generator.recompute_kv_cache,
            int8=config.generator.quantization == "int8",
            world=self.context.world,
        )

    def run(self) -> None:
        lower_priority(self.context.config.generator.nice)  # not before: start-up is waited for
        self.context.say_hello(
            policy_version=self.engine.policy_version,
            detail={"fetching_ranks": ",".join(map(str, self.receiver.ranks))},
        )
        while self.stopped is None:
            self._take_messages()
            self._receive_weights()
            self._decode()
        self.context.world.share(self.stopped)
        self.receiver.close()

    @property
    def _has_work(self) -> bool:
        paused = self.staged is not None and not self.in_flight
        return self.engine.num_running > 0 or (self.engine.num_waiting > 0 and not paused)

    # ------------------------------------------------------------------ messages

    def _take_messages(self) -> None:
        if self._has_work:
            self._take_all(timeout_s=0.0)
        elif self.request is not None:
            self._take_all(timeout_s=_POLL_WAIT_S)
        else:
            self.context.line.set_activity("wait for prompts or weights")
            with self.context.tracer.span("wait", on="controller"):
                while not self._take_all(timeout_s=_IDLE_WAIT_S):
                    continue

    def _take_all(self, timeout_s: float) -> bool:
        """Handle what has arrived; waits `timeout_s` for the first message. True if any came."""
        message = self.context.receive(timeout_s)
        arrived = message is not None
        while message is not None:
            self._handle(message)
            # after Stop nothing is waited for; of a silent controller it is said again for ever
            message = None if self.stopped is not None else self.context.receive(0.0)
        return arrived

    def _handle(self, message: ToExecutor) -> None:
        if isinstance(message, Generate):
            for request in message.requests:
                self.engine.submit(request)
        elif isinstance(message, ReceiveWeights):
            self.request, self.requested_at = message, time.monotonic()
            self.weights.start(message)
        elif isinstance(message, Stop):
            self.stopped = message
        else:
            raise self.context.unexpected(message)

    # ------------------------------------------------------------------ weights

    def _receive_weights(self) -> None:
        if self.request is not None and self.staged is None:
            self.staged = self._poll(self.request)
            if self.staged is not None and not self.in_flight:
                self.engine.pause_admission(True)
        if self.staged is not None and (self.in_flight or self.engine.num_running == 0):
            self._switch(self.staged)

    def _poll(self, request: ReceiveWeights) -> StagedWeights | None:
        """Weights that did not arrive whole leave the old ones in force."""
        try:
            return self.weights.poll()
        except WeightSyncError as error:
            log.warning("version %d is not taken: %s", request.version, error)
            self.context.line.send(
                WeightsRefused(version=request.version, epoch=request.epoch, reason=str(error))
            )
            self.request = None
            return None

    def _switch(self, staged: StagedWeights) -> None:
        assert self.request is not None
        self.context.line.set_activity(f"load version {staged.version}")
        with self.context.tracer.span("load_weights", version=staged.version):
            self.weights.switch()
            self.engine.load_weights(staged.version, staged.tensors())
            staged.release()
        self.context.line.send(
            WeightsReceived(
                version=staged.version,
                epoch=self.request.epoch,
                checksum=staged.checksum,
                seconds=time.monotonic() - self.requested_at,
            )
        )
        self.staged = self.request = None
        self.engine.pause_admission(False)

    # ------------------------------------------------------------------ decoding

    def _decode(self) -> None:
        """Decode until something else wants attention: a finished group, a message, weights."""
        if not self._has_work:
            return
        self.context.line.set_activity(f"decode with version {self.engine.policy_version}")
        with self.context.tracer.span("generate", version=self.engine.policy_version):
            while self._has_work:
                finished = self.engine.step()
                if finished:
                    self.context.line.send(Generated(groups=finished))
                if self.request is not None and self.staged is None:
                    self._receive_weights()
                if self.staged is not None and self.in_flight:
                    return
                if self._take_all(timeout_s=0.0) and self.stopped is not None:
                    return
