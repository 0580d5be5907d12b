"""The trainer: one DeepSpeed engine over all ranks of this world.

    wait --Train--> train step --Trained--> wait
    wait --PublishWeights--> snapshot --WeightsPublished--> wait     (the transfer goes on behind)
    wait --SaveCheckpoint--> copy --CheckpointCopied--> wait         (a thread writes zero/, then
                                                                      says CheckpointSaved)

    wait --Refer--> reference's log-probs --Referred--> wait         (reference.placement trainer)
    wait --SaveReference--> write a model folder --ReferenceSaved--> wait

Every rank runs the same loop; the leader receives and shares each command.
"""

from __future__ import annotations

import shutil
import time
from concurrent.futures import Future
from pathlib import Path

from llamarl_hpc.channels.messages import (
    CheckpointCopied,
    CheckpointSaved,
    LoadReference,
    PublishWeights,
    Refer,
    ReferenceSaved,
    SaveCheckpoint,
    SaveReference,
    Stop,
    ToExecutor,
    Train,
    Trained,
    WeightsPublished,
    WeightsSummed,
)
from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.executors.base import Context
from llamarl_hpc.executors.reference import answer, make_reference
from llamarl_hpc.models.load import resolve_model, save_hf_folder
from llamarl_hpc.placement import init_process_group, refers_apart
from llamarl_hpc.storage.checkpoint import CheckpointStore
from llamarl_hpc.training.engine import TrainerEngine
from llamarl_hpc.training.snapshot import SnapshotWriter
from llamarl_hpc.weight_sync.base import Sent
from llamarl_hpc.weight_sync.select import make_publisher


class TrainerExecutor:
    """Builds the engine (from the newest valid checkpoint if there is one), then obeys."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.world = context.world
        init_process_group(context.world, device=context.device)
        self.model_folder = resolve_model(context.config.model.path)
        self.engine = TrainerEngine(
            context.config, context.world, self.model_folder, device=context.device
        )
        has_reference = context.config.algorithm.beta > 0.0 and not refers_apart(context.config)
        self.reference = make_reference(context) if has_reference else None
        checkpoint = self.world.bcast(self._newest_checkpoint())
        if checkpoint is not None:
            self.engine.load(Path(checkpoint))
        self.snapshots = SnapshotWriter(
            self.world, timeout_s=context.config.channels.reply_timeout_s
        )
        self.publisher = make_publisher(
            context.run, context.config, context.world, self.engine, context.device
        )

    def _newest_checkpoint(self) -> str | None:
        if not self.world.is_leader:
            return None
        keep = self.context.config.trainer.save_total_limit
        checkpoint = CheckpointStore(self.context.run, keep).latest()
        return None if checkpoint is None else str(checkpoint.path)

    def run(self) -> None:
        self.context.say_hello(
            policy_version=self.engine.policy_version,
            detail={"store_address": self.publisher.store_address},
        )
        try:
            while not isinstance(command := self._next_command(), Stop):
                self._obey(command)
        finally:
            self.publisher.close()

    def _next_command(self) -> ToExecutor:
        message: ToExecutor | None = None
        if self.world.is_leader:
            with self.context.tracer.span("wait", on="controller"):
                self.context.line.set_activity("wait for a batch")
                while message is None:
                    self.snapshots.check()
                    message = self.context.receive(timeout_s=1.0)
        command: ToExecutor = self.world.share(message)
        return command

    def _obey(self, command: ToExecutor) -> None:
        self.snapshots.check()
        if isinstance(command, Train):
            self._train(command)
        elif isinstance(command, PublishWeights):
            self._publish(command)
        elif isinstance(command, SaveCheckpoint):
            self._save(command)
        elif isinstance(command, SaveReference):
            self._save_reference(command)
        elif isinstance(command, Refer) and self.reference is not None:
            self._activity(f"reference's log-probs of {len(command.items)} groups")
            with self.context.tracer.span("refer", groups=len(command.items)):
                answer(self.context, self.reference, command)
        elif isinstance(command, LoadReference) and self.reference is not None:
            self.reference.load(command.step, Path(command.folder))
        else:
            raise self.context.unexpected(command)

    def _activity(self, text: str) -> None:
        if self.world.is_leader:
            self.context.line.set_activity(text)

    def _train(self, command: Train) -> None:
        self._activity(f"train step {command.batch.step}")
        with self.context.tracer.span("train", step=command.batch.step):
            result = self.engine.train_step(command.batch if self.world.is_leader else None)
        if self.world.is_leader:
            self.context.line.send(
                Trained(
                    step=command.batch.step,
                    version=self.engine.policy_version,
                    metrics=result.metrics,
                    logprobs=result.logprobs,
                    entropy=result.entropy,
                )
            )

    def _save_reference(self, command: SaveReference) -> None:
        self._activity(f"write the reference of step {command.step}")
        start = time.monotonic()
        tensors, folder = self.engine.export_state_dict(), Path(command.folder)
        if self.world.is_leader:
            shutil.rmtree(folder, ignore_errors=True)  # of steps that a resume made again
            save_hf_folder(tensors, self.model_folder, folder)
        for _ in tensors:  # every rank takes part to the end
            continue
        self.world.barrier()
        if self.world.is_leader:
            self.context.line.send(
                ReferenceSaved(step=command.step, seconds=time.monotonic() - start)
            )

    def _publish(self, command: PublishWeights) -> None:
        if command.version != self.engine.policy_version:
            raise WeightSyncError(
                f"asked to publish version {command.version}, but the trainer holds "
                f"{self.engine.policy_version}"
            )
        self._activity(f"publish version {command.version}")
        with self.context.tracer.span("publish_weights", version=command.version):
            receipt = self.publisher.publish(command.version, command.epoch, command.members)
        if self.world.is_leader:
            self.context.line.send(
                WeightsPublished(
                    version=receipt.version,
                    epoch=command.epoch,
                    num_bytes=receipt.num_bytes,
                    seconds=receipt.seconds,
                )
            )
        if receipt.sent is not None:
            receipt.sent.add_done_callback(lambda sent: self._summed(command, sent))

    def _summed(self, command: PublishWeights, sent: Future[Sent]) -> None:
        """Called by the thread that sends the weights."""
        if not sent.cancelled():
            self.context.line.send(
                WeightsSummed(
                    version=command.version,
                    epoch=command.epoch,
                    checksum=sent.result().checksum,
                    sent_share=sent.result().share,
                )
            )

    def _save(self, command: SaveCheckpoint) -> None:
        self._activity(f"checkpoint at step {command.step}")
        start = time.monotonic()
        with self.context.tracer.span("checkpoint", step=command.step):
            self.snapshots.wait()
            snapshot = self.engine.snapshot()
            self.snapshots.begin(
                snapshot, Path(command.folder), lambda: self._saved(command, start)
            )
            if not self.context.config.trainer.save_in_background:
                self.snapshots.wait()
            self.world.barrier()
        if self.world.is_leader:
            self.context.line.send(
                CheckpointCopied(step=command.step, seconds=time.monotonic() - start)
            )

    def _saved(self, command: SaveCheckpoint, start: float) -> None:
        """Called by the leader's writing thread."""
        self.context.line.send(
            CheckpointSaved(
                step=command.step, folder=command.folder, seconds=time.monotonic() - start
            )
        )
