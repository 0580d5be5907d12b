"""The controller's main loop: one optimizer step after the other, everything else beside it.

    prompts -> generation -> rewards -> buffer -> training -> weight sync -> generation
               `--------- RolloutFlow --------'    Controller   WeightFlow

Tasks of this process, and what each waits for:
  train        (main)  the batch of the next step, then the trainer's answers
  listen               any executor's message; hands it to the flow it belongs to
  watch_exits          the end of a job step; restarts replicas, ends the run with the trainer
  watch_heartbeats     nothing; kills executors that fell silent
  watch_replies        nothing; kills executors that leave a request unanswered
  show                 nothing; refreshes the display
  ending.watch         the job's end, signals, the stop file; ends the attempt in time
No task holds a lock; all state is changed between two awaits, then `Bell.ring` wakes the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from llamarl_hpc.batching.buffer import (
    ScoredGroup,
    make_train_batch,
)
from llamarl_hpc.batching.credit import CreditRules
from llamarl_hpc.channels.messages import (
    CheckpointCopied,
    SaveCheckpoint,
    Train,
    Trained,
)
from llamarl_hpc.config.losses import LossSettings
from llamarl_hpc.config.schema import Config
from llamarl_hpc.controller import signals
from llamarl_hpc.controller.bell import Bell
from llamarl_hpc.controller.books import Books
from llamarl_hpc.controller.deadline import Deadline
from llamarl_hpc.controller.ending import TIME_LIMIT, Ending
from llamarl_hpc.controller.evaluation import HeldOut
from llamarl_hpc.controller.fleet import Fleet
from llamarl_hpc.controller.grace import Grace
from llamarl_hpc.controller.inbox import Inbox
from llamarl_hpc.controller.parts import Parts
from llamarl_hpc.controller.rollouts import RolloutFlow
from llamarl_hpc.controller.saving import Saving
from llamarl_hpc.controller.schedule import Replica, Schedule
from llamarl_hpc.controller.snapshot import take_snapshot
from llamarl_hpc.controller.state import RunState
from llamarl_hpc.controller.tally import Tally
from llamarl_hpc.controller.timings import StepTimings
from llamarl_hpc.controller.trainer_line import TrainerLine
from llamarl_hpc.controller.weights import WeightFlow
from llamarl_hpc.errors import (
    ConfigError,
    ExecutorFailed,
    LlamarlError,
    StoppedByAlarm,
    StoppedBySignal,
    StoreError,
)
from llamarl_hpc.observability.alarms import Alarms
from llamarl_hpc.observability.progress import Snapshot
from llamarl_hpc.placement import executor_names, role_of
from llamarl_hpc.weight_sync.segment import remove_stale

log = logging.getLogger(__name__)
_DISK_POLL_S = 0.2
_CLOSE_TIMEOUT_S = 30.0  # for rollouts to get to the disk
_GRACE_S, _GRACE_AT_ONCE_S = 10.0, 1.0  # for executors to leave by themselves
_WAITING = "wait for a batch"  # phase
_SLURMS = ("SIGTERM", "SIGUSR2")  # what Slurm sends, and may give the reason of
_SIGNALS = (*_SLURMS, "SIGINT", "SIGHUP")
_QUEUE_DEPTH = 2  # completions at a replica, as a multiple of what it decodes at a time


class Controller:
    """One attempt of a run. `run()` returns when it is done and raises why it is not."""

    def __init__(self, config: Config, attempt: int, parts: Parts, state: RunState) -> None:
        self.config, self.attempt, self.parts, self.state = config, attempt, parts, state
        self.bell = Bell()
        self.stop_reason = ""
        self._is_decoupled = LossSettings.of(config.algorithm).is_decoupled
        replicas = {n: Replica(n) for n in executor_names(config) if role_of(n) == "generator"}
        self.schedule = self._make_schedule(replicas)
        self.fleet = Fleet(config, parts.channel, parts.supervisor, self.bell)
        heldout = [parts.heldout[k] for k in range(len(parts.heldout))]
        self.heldout = HeldOut(config, heldout, replicas)
        self.tally = Tally(parts.writer.append)
        self.flow = RolloutFlow(
            config,
            fleet=self.fleet,
            bell=self.bell,
            schedule=self.schedule,
            heldout=self.heldout,
            prompt_of=parts.cursor.prompt_at,
            store=self.tally.store,
            references=parts.references,
            attempt=attempt,
        )
        self.flow.on_issued = self.tally.issue
        self.books = Books(config, attempt, store=self.tally.store, metrics=parts.metrics)
        self.weights = WeightFlow(config, self.fleet, self.bell, replicas)
        self.weights.is_held = lambda: self.heldout.holds_back(self.state.policy_version)
        self.saving = Saving(
            store=parts.checkpoints,
            writer=parts.writer,
            metrics=parts.metrics,
            bell=self.bell,
            fleet=self.fleet,
            timeout_s=config.channels.reply_timeout_s,
            expected_s=parts.checkpoint_s,
        )
        self.trainer = TrainerLine(
            config,
            self.fleet,
            self.bell,
            parts.references,
            refers_here=config.algorithm.beta > 0.0 and not self.flow.reference.is_on,
        )
        self.inbox = Inbox(
            parts.channel,
            bell=self.bell,
            fleet=self.fleet,
            replicas=replicas,
            flow=self.flow,
            weights=self.weights,
            trainer=self.trainer,
            saving=self.saving,
            progress=parts.progress,
            reply_timeout_s=config.channels.reply_timeout_s,
        )
        self.deadline = Deadline(config.launch.stop_margin_s)
        self.deadline.pace.checkpoint_s = parts.checkpoint_s
        self.grace = Grace(
            self.deadline.pace,
            signal_delay_s=config.launch.signal_delay_s,
            kill_wait_s=None if parts.job is None else parts.job.kill_wait_s,
        )
        self.ending = Ending(
            self.deadline,
            job=parts.job,
            poll_s=config.launch.poll_s,
            stop_file=parts.stop_file,
            stop=self.request_stop,
            leave=self.leave_now,
            is_saving=lambda: self.saving.is_busy,
            is_waiting=lambda: self.phase == _WAITING,
        )
        self.fleet.on_signal = self.ending.on_executor_signal
        self.fleet.is_ending = self._is_ending
        self.alarms = Alarms(config.alarms)
        self.timings = StepTimings(
            flow=self.flow,
            weights=self.weights,
            saving=self.saving,
            deadline=self.deadline,
            executors=self.fleet.members,
            replicas=replicas,
            elapsed_before_s=state.elapsed_s,
        )
        self.last_metrics: dict[str, float] = {}
        self.phase = "start executors"
        self._last_checkpoint = state.step if state.resumed else -1
        self._main: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup | None = None

    def _make_schedule(self, replicas: dict[str, Replica]) -> Schedule:
        rollout = self.config.rollout
        room = max(self.config.generator.max_concurrency * _QUEUE_DEPTH, rollout.num_generations)
        return Schedule(
            prompts_per_step=rollout.prompts_per_step,
            num_generations=rollout.num_generations,
            max_staleness=self.config.algorithm.max_staleness,
            max_outstanding=room,
            next_ticket=self.state.step * rollout.prompts_per_step + self.state.dropped,
            dropped=self.state.dropped,
            end_ticket=self.config.trainer.max_steps * rollout.prompts_per_step,
            skipped_steps=self.state.step - self.state.policy_version,
            replicas=replicas,
        )

    # ------------------------------------------------------------------ life of an attempt

    async def run(self) -> None:
        """Raises StoppedBySignal, ExecutorFailed or ConfigError; plain return: all steps done."""
        with signals.heard_by(self.request_stop):
            await self._see_through()

    async def _see_through(self) -> None:
        self._main = asyncio.current_task()
        reason, grace_s = "the run was cut short", _GRACE_S
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                beside = [
                    tasks.create_task(task)
                    for task in (
                        self.inbox.listen(),
                        self.fleet.watch_exits(),
                        self.fleet.watch_heartbeats(),
                        self.inbox.watch_replies(),
                        self._show(),
                        self.ending.watch(),
                    )
                ]
                await self._train()
                for task in beside:
                    task.cancel()
            reason = self.stop_reason or "the run is complete"
        except BaseExceptionGroup as group:
            failure = await self._explained(_first_cause(group))
            reason = str(failure).splitlines()[0]
            failure.__cause__ = group
        except asyncio.CancelledError:
            reason = f"stopped at once ({self.stop_reason}), without a new checkpoint"
            grace_s = _GRACE_AT_ONCE_S
            failure = StoppedBySignal(reason)
        finally:
            unwritten = await self._leave(reason, grace_s)
        if unwritten is not None:  # worse than whatever else ended the run
            besides = "" if failure is None or isinstance(failure, StoreError) else f"; {reason}"
            raise StoreError(f"{unwritten}{besides}") from failure
        if failure is not None:
            raise failure
        if self.stop_reason:
            kept = "without a new checkpoint" if self.state.step else "at the start"
            if self._last_checkpoint == self.state.step:
                kept = "with a checkpoint"
            made = f"{self.state.step} of {self.config.trainer.max_steps}"
            when = f"after step {self.state.step - 1}" if self.state.step else "before step 0"
            raise StoppedBySignal(f"stopped by {self.stop_reason} {when} ({made}), {kept}")

    async def _leave(self, reason: str, grace_s: float) -> StoreError | None:
        """Close the books, then the executors; works after any failure, and returns its own."""
        self._main = None  # a third Ctrl-C must not cut this short
        with contextlib.suppress(StoreError):  # a broken store says so again when it is closed
            if abandoned := self.flow.abandon_all(reason):
                log.info("%d groups were on their way and are abandoned: %s", abandoned, reason)
        await self.fleet.stop(reason, grace_s)
        unwritten = await self._close_store()
        self.parts.metrics.close()
        await self.parts.channel.close()
        for path in await asyncio.to_thread(remove_stale):  # gigabytes, if the trainer was killed
            log.info("removed %s, which a killed trainer had left behind", path)
        self.parts.progress.close()
        return unwritten

    async def _close_store(self) -> StoreError | None:
        """A disk that is full is given some time, not the store's own ten minutes."""
        try:
            await asyncio.to_thread(self.parts.writer.close, _CLOSE_TIMEOUT_S)
        except StoreError as error:
            log.error("%s", error)
            return error
        return None

    def request_stop(self, reason: str) -> None:
        """Stop after the current optimizer step; asked twice by Ctrl-C: stop at once. A signal's
        name gives way to what is behind it."""
        if self.stop_reason and reason == "SIGINT" and self._main is not None:
            self._main.cancel()
        if reason in _SIGNALS:
            self.ending.look_soon()
        behind = self.stop_reason.startswith(_SLURMS) and not reason.startswith(_SIGNALS)
        if not self.stop_reason or behind:
            self.stop_reason = reason
            self.phase = "stop after this step"
            self.parts.progress.note(f"{reason}: stopping after this step")
            self.bell.ring()

    def leave_now(self, reason: str) -> None:
        """Stop without waiting for anything: there is no time left for it."""
        self.request_stop(reason)
        if self._main is not None and not self._main.cancelling():
            self._main.cancel()

    async def _is_ending(self) -> bool:
        """Whether a dead executor need not be started again. Asks Slurm: it may be its doing."""
        if not self.stop_reason:
            await self.ending.is_over()
        return bool(self.stop_reason)

    async def _explained(self, error: BaseException) -> BaseException:
        """An executor that died because Slurm ends the job was stopped with it."""
        if isinstance(error, ExecutorFailed) and await self.ending.is_over():
            first = str(error).splitlines()[0]
            return StoppedBySignal(f"stopped by {self.stop_reason}: {first}")
        return error

    # ------------------------------------------------------------------ training

    async def _train(self) -> None:
        await self.fleet.start(is_stopped=lambda: bool(self.stop_reason))
        self.phase = "first weights"
        wanted = self.config.evaluation
        if not self.state.resumed and wanted.at_start:
            self._begin_evaluation()
        await self._drive(self._have_first_weights)
        self.timings.begin()
        while self.state.step < self.config.trainer.max_steps:
            self.phase = _WAITING
            if not self.deadline.fits_step(time.monotonic()):
                self.request_stop(TIME_LIMIT)
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
        for alarm in self.alarms.check(self.last_metrics):
            figures = {f"alarm/{alarm.name}": alarm.value}
            self.parts.metrics.event("alarm", policy_version=version, metrics=figures)
            if not alarm.stops:
                log.warning("alarm at step %d: %s", step, alarm.sentence)
                continue
            if self.last_metrics["steps_refused"]:
                await self._last_words()
            await self.saving.settle()
            newest = self._last_checkpoint
            good = f"the checkpoint of step {newest}" if newest > 0 else "the start"
            raise StoppedByAlarm(
                f"stopped by an alarm after step {step}: {alarm.sentence}; the last good state is "
                f"{good}: mend the cause, then 'llamarl-hpc resume', or set "
                f"alarms.{alarm.name} to warn"
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
            while writer.trouble and not writer.has_failed and not self.stop_reason:
                await asyncio.sleep(_DISK_POLL_S)
            self.parts.metrics.event("disk", policy_version=version, metrics={"disk/waiting": 0.0})
        return not self.stop_reason

    def _have_first_weights(self) -> bool:
        """All replicas that live can draw; one that died meanwhile joins when it is up again."""
        ready = [r for r in self.schedule.replicas.values() if r.ready]
        return bool(ready) and all(r.version >= 0 for r in ready)

    async def _drive(self, done: Callable[[], bool]) -> bool:
        """Keep weights and evaluation going until `done`. False: asked to stop."""
        while not self.stop_reason:
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
            self.stop_reason
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
        self.parts.progress.step(self._snapshot())
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
        self._last_checkpoint = step
        if not self.config.trainer.save_in_background:
            await self.saving.settle()

    async def _last_words(self) -> None:
        """A checkpoint of the last step, complete on disk."""
        newer = self.state.step > max(self._last_checkpoint, 0)
        if newer and self.deadline.fits_checkpoint(time.monotonic()):
            await self._checkpoint()
        await self.saving.settle()

    async def _finish(self) -> None:
        """The last checkpoint, and after the last step the last evaluation."""
        await self._last_words()
        if self.stop_reason:
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

    def _snapshot(self) -> Snapshot:
        return take_snapshot(
            self.config,
            self.state,
            self.fleet,
            self.flow,
            phase=self.phase,
            elapsed_s=self.timings.elapsed_s,
            metrics=self.last_metrics,
        )

    async def _show(self) -> None:
        while True:
            self.parts.progress.refresh(self._snapshot())
            await asyncio.sleep(0.5)


def _first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended the run: one of ours if there is one."""
    leaves: list[BaseException] = []
    stack: list[BaseException] = [group]
    while stack:
        error = stack.pop()
        if isinstance(error, BaseExceptionGroup):
            stack.extend(reversed(error.exceptions))
        else:
            leaves.append(error)
    ours = [e for e in leaves if isinstance(e, LlamarlError)]
    return (ours or leaves)[0]
