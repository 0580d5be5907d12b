"""The way of training: one optimizer step after the other, everything else beside it.

    wait for the batch -> train -> publish the weights -> books -> alarms -> checkpoint, evaluation
                                                                             (when they are due)

While it waits it keeps weights and evaluation going (`_drive`), and it leaves between two of these
when the attempt is to stop. What an attempt is besides is in `controller/loop.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from llamarl_hpc.batching.buffer import ScoredGroup, make_train_batch
from llamarl_hpc.batching.credit import CreditRules
from llamarl_hpc.channels.messages import CheckpointCopied, SaveCheckpoint, Train, Trained
from llamarl_hpc.config.losses import LossSettings
from llamarl_hpc.config.schema import Config
from llamarl_hpc.controller.ending import TIME_LIMIT
from llamarl_hpc.controller.parts import Parts
from llamarl_hpc.controller.snapshot import take_snapshot
from llamarl_hpc.controller.state import RunState
from llamarl_hpc.controller.works import Works
from llamarl_hpc.errors import ConfigError, StoppedByAlarm
from llamarl_hpc.observability.progress import Snapshot

log = logging.getLogger(__name__)
_DISK_POLL_S = 0.2
_WAITING = "wait for a batch"  # phase


class Training:
    """The steps of one attempt. `is_stopping` says whether it is to stop, `stop` asks for it."""

    def __init__(
        self,
        config: Config,
        parts: Parts,
        works: Works,
        state: RunState,
        *,
        is_stopping: Callable[[], bool],
        stop: Callable[[str], None],
    ) -> None:
        self.config, self.parts, self.state = config, parts, state
        self.is_stopping, self.stop = is_stopping, stop
        self.bell, self.fleet, self.schedule = works.bell, works.fleet, works.schedule
        self.flow, self.heldout, self.weights = works.flow, works.heldout, works.weights
        self.trainer, self.saving = works.trainer, works.saving
        self.tally, self.books, self.alarms = works.tally, works.books, works.alarms
        self.timings, self.deadline, self.grace = works.timings, works.deadline, works.grace
        self.phase = "start executors"
        self.last_metrics: dict[str, float] = {}
        self.last_checkpoint = state.step if state.resumed else -1
        self._is_decoupled = LossSettings.of(config.algorithm).is_decoupled
        self._tasks: asyncio.TaskGroup | None = None
        self.weights.is_held = lambda: self.heldout.holds_back(self.state.policy_version)

    @property
    def is_waiting(self) -> bool:
        """For a batch: nothing is lost by leaving now."""
        return self.phase == _WAITING

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """All steps that are left, or until the attempt is to stop; the last checkpoint, and after
        the last step an evaluation. `tasks`: where work beside goes."""
        self._tasks = tasks
        await self.fleet.start(is_stopped=self.is_stopping)
        self.phase = "first weights"
        wanted = self.config.evaluation
        if not self.state.resumed and wanted.at_start:
            self._begin_evaluation()
        await self._drive(self._have_first_weights)
        self.timings.begin()
        while self.state.step < self.config.trainer.max_steps:
            self.phase = _WAITING
            if not self.deadline.fits_step(time.monotonic()):
                self.stop(TIME_LIMIT)
            if not await self._drive(lambda: not self.flow.buffer.missing(self.state.step)):
                break
            if not await self._rollouts_can_be_written():
                break
            await self._step(await self._take_batch())
            await self._heed_alarms()
            await self._after_step()
        await self._finish()

    async def _heed_alarms(self) -> None:
        """Tell what goes wrong. Raises StoppedByAlarm if the config wants it: after a checkpoint
        if the step was refused, for the weights are unharmed; else the newest one is of a time
        before the trouble began (see `_after_step`)."""
        step, version = self.state.step - 1, self.state.policy_version  # the one just made
        begun = self.alarms.check(self.last_metrics)
        for alarm in begun:
            figures = {f"alarm/{alarm.name}": alarm.value}
            self.parts.metrics.event("alarm", policy_version=version, metrics=figures)
            if not alarm.stops:
                log.warning("alarm at step %d: %s", step, alarm.sentence)
        worst = next((alarm for alarm in begun if alarm.stops), None)
        if worst is None:
            return
        if self.last_metrics["steps_refused"]:
            await self._last_words()
        await self.saving.settle()
        newest = self.last_checkpoint
        good = f"the checkpoint of step {newest}" if newest > 0 else "the start"
        raise StoppedByAlarm(
            f"stopped by an alarm after step {step}: {worst.sentence}; the last good state is "
            f"{good}: mend the cause, then 'llamarl-hpc resume', or set "
            f"alarms.{worst.name} to warn"
        )

    async def _rollouts_can_be_written(self) -> bool:
        """Waits while they cannot: a disk that is full must not cost what was trained on. False:
        asked to stop. The writer itself gives up after a while, and the next step raises it."""
        writer = self.parts.writer
        if trouble := writer.trouble:
            version = self.state.policy_version
            self.phase = f"wait for the disk: {trouble}"
            self.parts.progress.note(f"training waits: rollouts cannot be written ({trouble})")
            self.parts.metrics.event("disk", policy_version=version, metrics={"disk/waiting": 1.0})
            while writer.trouble and not writer.has_failed and not self.is_stopping():
                await asyncio.sleep(_DISK_POLL_S)
            self.parts.metrics.event("disk", policy_version=version, metrics={"disk/waiting": 0.0})
        return not self.is_stopping()

    def _have_first_weights(self) -> bool:
        """All replicas that live can draw; one that died meanwhile joins when it is up again."""
        ready = [r for r in self.schedule.replicas.values() if r.ready]
        return bool(ready) and all(r.version >= 0 for r in ready)

    async def _drive(self, done: Callable[[], bool]) -> bool:
        """Keep weights and evaluation going until `done`. False: asked to stop."""
        while not self.is_stopping():
            self._settle_evaluation()
            if self.weights.is_due(self.state.policy_version):
                await self.weights.publish(self.state.policy_version)
                continue
            await self.flow.pump()
            if done():
                return True
            await self.bell.until(lambda: bool(done() or self._has_chores()))
        return False

    def _has_chores(self) -> bool:
        return bool(
            self.is_stopping()
            or self.weights.is_due(self.state.policy_version)
            or self.heldout.is_over(self.state.policy_version)
        )

    async def _take_batch(self) -> list[ScoredGroup]:
        """The groups of the next step. Without a single reward in it there is nothing to learn,
        now and probably later: raises ConfigError, after a checkpoint."""
        groups = self.flow.take(self.state.step)
        if all(group.failed for group in groups):
            await self._last_words()
            raise ConfigError(
                f"no group of step {self.state.step} could be scored ({groups[0].error}); "
                "mend the reward function, then continue with 'llamarl-hpc resume'"
            )
        return groups

    async def _step(self, groups: list[ScoredGroup]) -> None:
        """One optimizer step, its publication, and its row in every book."""
        step, trainer_version = self.state.step, self.state.policy_version
        waited_s = self.timings.since_step_s
        groups = await self.trainer.refer(groups)
        batch = make_train_batch(
            groups,
            step=step,
            temperature=self.config.rollout.temperature,
            rules=CreditRules.of(self.config),
            trainer_version=trainer_version if self._is_decoupled else None,
        )
        self.phase, asked = "train", time.monotonic()
        trained = await self.trainer.ask(Train(batch=batch), Trained)
        self.deadline.pace.trainings.append(time.monotonic() - asked)
        used = groups[-1].ticket + 1
        dropped = used - (step + 1) * self.config.rollout.prompts_per_step
        self.state = self.state.after_step(trained.version, dropped=dropped)
        self.schedule.skipped_steps = self.state.step - self.state.policy_version
        if self.weights.is_due(self.state.policy_version):
            await self.weights.publish(self.state.policy_version)
        await self.flow.pump()
        self.books.trained(groups, batch, trained, trainer_version=trainer_version)
        self.flow.booked()
        self.last_metrics = self.books.step(
            groups,
            trained,
            trainer_version=trainer_version,
            timings=self.timings.end_step(
                waited_s=waited_s, tokens=sum(group.num_tokens for group in groups)
            )
            | {"time/stop": self.grace.stop_s}
            | self.flow.sampling_figures(step),
        )
        self.parts.progress.step(self.snapshot())
        self.grace.consider()

    async def _renew_reference(self) -> None:
        """The policy as it is now becomes the reference; in a folder first, for a resume."""
        self.phase = "renew the reference"
        await self.trainer.save_reference(self.state.step)
        await self.trainer.load_reference()
        await self.flow.reference.on_update()
        self.parts.references.prune(self.parts.checkpoints.steps())

    # ------------------------------------------------------------------ after a step

    async def _after_step(self) -> None:
        trainer = self.config.trainer
        step = self.state.step
        is_last = step == trainer.max_steps
        if self.parts.references.is_due(step):
            await self._renew_reference()
        is_measured = bool(trainer.eval_steps) and step % trainer.eval_steps == 0
        is_due = bool(trainer.save_steps) and step % trainer.save_steps == 0
        is_due = (is_due or (is_measured and trainer.save_best)) and not is_last
        if is_due and not self.alarms.is_suspicious:  # it would not be of a good state
            await self._checkpoint()
        else:
            self.parts.writer.flush(wait=False)  # durable while the next step runs
        if is_measured and not is_last:
            await self._evaluate_beside()

    async def _checkpoint(self) -> None:
        """Trainer state and controller state of one moment, complete or not at all. Returns when
        the trainer may go on; the rest is up to `self.saving`."""
        assert self._tasks is not None
        step = self.state.step
        self.phase = "checkpoint"
        self.tally.check(self.flow.in_flight())
        folder = await self.saving.begin(step)
        with self.parts.tracer.span("checkpoint", step=step):
            try:
                await self.trainer.ask(SaveCheckpoint(step=step, folder=folder), CheckpointCopied)
            except BaseException:
                self.saving.abort()
                raise
        elapsed = self.timings.elapsed_s
        self.saving.complete_beside(
            self._tasks,
            self.state.to_checkpoint(self.parts.cursor.state(), elapsed),
            policy_version=self.state.policy_version,
        )
        self.last_checkpoint = step
        if not self.config.trainer.save_in_background:
            await self.saving.settle()

    async def _last_words(self) -> None:
        """A checkpoint of the last step, complete on disk."""
        newer = self.state.step > max(self.last_checkpoint, 0)
        if newer and self.deadline.fits_checkpoint(time.monotonic()):
            await self._checkpoint()
        await self.saving.settle()

    async def _finish(self) -> None:
        """The last checkpoint, and after the last step the last evaluation."""
        await self._last_words()
        if self.is_stopping():
            return
        if self.config.evaluation.at_end:
            self.phase = "evaluate"
            await self._drive(lambda: self.heldout.current is None)
            if not self.heldout.was_measured(self.state.policy_version):
                self._begin_evaluation()
        await self._drive(lambda: self.heldout.current is None)

    # ------------------------------------------------------------------ evaluation

    def _begin_evaluation(self) -> None:
        """Of the weights that go out next (or are out already)."""
        next_id = self.heldout.begin(self.state.policy_version, self.state.next_eval_id)
        self.state = self.state.after_evaluation(next_id)
        if self.config.trainer.save_best:
            self.saving.best.measuring = self.state.policy_version

    async def _evaluate_beside(self) -> None:
        """Begin one; training goes on as soon as the weights to be measured are on their way."""
        if await self._drive(lambda: self.heldout.current is None):
            self._begin_evaluation()
            await self._drive(lambda: self.weights.offered >= self.state.policy_version)

    def _settle_evaluation(self) -> None:
        settled = self.heldout.settle(self.state.policy_version)
        if settled is None:
            return
        version, metrics = settled
        self.parts.metrics.event("eval", policy_version=version, metrics=metrics)
        if self.config.trainer.save_best:
            self.saving.best.on_accuracy(version, self.heldout.results[-1][1])
        self.parts.progress.note(
            f"held-out accuracy of version {version}: {self.heldout.results[-1][1]:.3f} "
            f"({metrics['eval/heldout/num_prompts']:.0f} questions)"
        )

    # ------------------------------------------------------------------ display

    def snapshot(self) -> Snapshot:
        """What the display shows."""
        return take_snapshot(
            self.config,
            self.state,
            self.fleet,
            self.flow,
            phase=self.phase,
            elapsed_s=self.timings.elapsed_s,
            metrics=self.last_metrics,
        )
