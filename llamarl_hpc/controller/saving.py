"""Checkpoints beside training: the trainer stands still for a copy, the rest happens behind it.

    begin --SaveCheckpoint--> copied (training goes on) --CheckpointSaved--> rollouts flushed,
    commit: state, manifest, COMPLETE, rename

One is under way at a time; whoever wants the next waits, and says so. What fails behind ends the
run like any other failure, with the checkpoint before it untouched.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from llamarl_hpc.channels.messages import CheckpointSaved
from llamarl_hpc.controller.bell import Bell
from llamarl_hpc.controller.fleet import Fleet
from llamarl_hpc.errors import ExecutorFailed
from llamarl_hpc.observability.metrics_log import MetricsLog
from llamarl_hpc.storage.checkpoint import CheckpointStore
from llamarl_hpc.storage.rollout_store import RolloutWriter

log = logging.getLogger(__name__)
_FLUSH_TIMEOUT_S = 120.0  # for rollouts to get to the disk


class Best:
    """Keeps the checkpoint with the highest held-out accuracy, which is known only later."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._accuracies: dict[int, float] = {}  # by policy version, no checkpoint yet
        self._steps: dict[int, int] = {}  # by policy version, of complete checkpoints
        self.measuring = -1  # version of the evaluation under way

    def on_complete(self, step: int, version: int) -> None:
        """A checkpoint is on disk."""
        self._steps[version] = step
        self._choose()

    def on_accuracy(self, version: int, accuracy: float) -> None:
        """Of an evaluation that is over."""
        self._accuracies[version], self.measuring = accuracy, -1
        self._choose()

    def _choose(self) -> None:
        for version in sorted(self._accuracies.keys() & self._steps.keys()):
            accuracy, best = self._accuracies.pop(version), self._store.best()
            if best is None or accuracy > best["accuracy"]:
                self._store.mark_best(self._steps[version], version, accuracy)
        self._store.waits_for_accuracy = self._steps.get(self.measuring)


class Saving:
    """The checkpoint that is being made, if any. Its steps are in the order of the file's head."""

    def __init__(
        self,
        *,
        store: CheckpointStore,
        writer: RolloutWriter,
        metrics: MetricsLog,
        bell: Bell,
        fleet: Fleet,
        timeout_s: float,
        expected_s: float,
    ) -> None:
        """`timeout_s`: for the trainer to have written its part. `expected_s`: for a checkpoint,
        before one was made; 0 if nobody knows."""
        self._store, self._writer, self._metrics = store, writer, metrics
        self._bell, self._fleet, self._timeout_s = bell, fleet, timeout_s
        self.best = Best(store)
        self._task: asyncio.Task[None] | None = None
        self._step = -1
        self._started = 0.0
        self.is_busy = False  # from the request to COMPLETE
        self._saved = -1  # step of the newest checkpoint that the trainer has written
        self._blocked_s = 0.0  # not yet reported
        self.last_seconds = expected_s  # from request to COMPLETE, last time

    async def begin(self, step: int) -> str:
        """The folder for the checkpoint of `step`, once the one before is complete."""
        started = time.monotonic()
        await self.settle()
        self._step, self._started, self.is_busy = step, started, True
        return str(self._store.begin(step))

    def abort(self) -> None:
        """The trainer could not even copy."""
        self.is_busy = False
        self._store.abort(self._step)

    def complete_beside(
        self, tasks: asyncio.TaskGroup, state: dict[str, Any], *, policy_version: int
    ) -> None:
        """The trainer has its copy: see to the rest in a task of its own. `state` is the
        controller's of the same moment."""
        self._blocked_s += time.monotonic() - self._started
        self._task = tasks.create_task(self._complete(self._step, state, policy_version))

    async def settle(self) -> None:
        """Until no checkpoint is under way."""
        if self._task is not None and not self._task.done():
            log.info("waiting for the checkpoint of step %d to be on disk", self._step)
            await asyncio.shield(self._task)  # its failure ends the run by itself, too

    def on_saved(self, message: CheckpointSaved) -> None:
        self._saved = message.step
        self._bell.ring()

    def blocked_s(self) -> float:
        """Seconds that training stood still for checkpoints since this was asked last."""
        seconds, self._blocked_s = self._blocked_s, 0.0
        return seconds

    async def _complete(self, step: int, state: dict[str, Any], policy_version: int) -> None:
        blocked_s = time.monotonic() - self._started
        try:
            if not await self._bell.until(lambda: self._saved == step, timeout_s=self._timeout_s):
                raise ExecutorFailed(
                    "trainer",
                    0,
                    self._fleet.members["trainer"].host,
                    f"did not finish writing the checkpoint of step {step} within "
                    f"{self._timeout_s:.0f} s (channels.reply_timeout_s)",
                )
            await asyncio.to_thread(self._writer.flush, _FLUSH_TIMEOUT_S)
        except BaseException:
            self.is_busy = False
            self._store.abort(step)
            raise
        await asyncio.to_thread(self._store.commit, step, state)
        self.is_busy = False
        self.best.on_complete(step, policy_version)
        self.last_seconds = time.monotonic() - self._started
        figures = {
            "time/checkpoint": self.last_seconds,
            "time/checkpoint_blocking": blocked_s,
        }
        self._metrics.event("checkpoint", policy_version=policy_version, metrics=figures)
        log.info(
            "checkpoint of step %d: %.1f s, training stood still for %.1f s",
            step,
            self.last_seconds,
            blocked_s,
        )
