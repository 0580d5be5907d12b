"""The life of an attempt: its tasks, what stops it, and how it leaves.

    prompts -> generation -> rewards -> buffer -> training -> weight sync -> generation
               `--------- RolloutFlow --------'     Training    WeightFlow

Tasks of this process, and what each waits for:
  training     (main)  the batch of the next step, then the trainer's answers
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

from llamarl_hpc.config.schema import Config
from llamarl_hpc.controller import signals
from llamarl_hpc.controller.ending import Ending, outranks
from llamarl_hpc.controller.parts import Parts
from llamarl_hpc.controller.state import RunState
from llamarl_hpc.controller.training import Training
from llamarl_hpc.controller.works import Works
from llamarl_hpc.errors import ExecutorFailed, LlamarlError, StoppedBySignal, StoreError
from llamarl_hpc.weight_sync.shared_memory.segment import remove_stale

log = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = 30.0  # for rollouts to get to the disk
_GRACE_S, _GRACE_AT_ONCE_S = 10.0, 1.0  # for executors to leave by themselves


class Controller:
    """One attempt of a run. `run()` returns when it is done and raises why it is not."""

    def __init__(self, config: Config, attempt: int, parts: Parts, state: RunState) -> None:
        self.config, self.parts = config, parts
        self.stop_reason = ""
        self.works = Works.wired(config, attempt, parts, state)
        self.training = Training(
            config,
            parts,
            self.works,
            state,
            is_stopping=lambda: bool(self.stop_reason),
            stop=self.request_stop,
        )
        self.ending = Ending(
            self.works.deadline,
            job=parts.job,
            poll_s=config.launch.poll_s,
            stop_file=parts.stop_file,
            stop=self.request_stop,
            leave=self.leave_now,
            is_saving=lambda: self.works.saving.is_busy,
            is_waiting=lambda: self.training.is_waiting,
        )
        self.works.fleet.on_signal = self.ending.on_executor_signal
        self.works.fleet.is_ending = self._is_ending
        self._main: asyncio.Task[None] | None = None

    @property
    def state(self) -> RunState:
        """What the next attempt would go on from."""
        return self.training.state

    async def run(self) -> None:
        """Raises StoppedBySignal, ExecutorFailed or ConfigError; plain return: all steps done."""
        with signals.heard_by(self.on_signal):
            await self._see_through()

    async def _see_through(self) -> None:
        self._main = asyncio.current_task()
        reason, grace_s = "the run was cut short", _GRACE_S
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [
                    tasks.create_task(task)
                    for task in (
                        self.works.inbox.listen(),
                        self.works.fleet.watch_exits(),
                        self.works.fleet.watch_heartbeats(),
                        self.works.inbox.watch_replies(),
                        self._show(),
                        self.ending.watch(),
                    )
                ]
                await self.training.run(tasks)
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
            if self.training.last_checkpoint == self.state.step:
                kept = "with a checkpoint"
            made = f"{self.state.step} of {self.config.trainer.max_steps}"
            when = f"after step {self.state.step - 1}" if self.state.step else "before step 0"
            raise StoppedBySignal(f"stopped by {self.stop_reason} {when} ({made}), {kept}")

    async def _leave(self, reason: str, grace_s: float) -> StoreError | None:
        """Close the books, then the executors; works after any failure, and returns its own."""
        self._main = None  # a third Ctrl-C must not cut this short
        with contextlib.suppress(StoreError):  # a broken store says so again when it is closed
            if abandoned := self.works.flow.abandon_all(reason):
                log.info("%d groups were on their way and are abandoned: %s", abandoned, reason)
        await self.works.fleet.stop(reason, grace_s)
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

    def on_signal(self, name: str) -> None:
        """Ends the attempt after this step; the second Ctrl-C does at once."""
        is_second = bool(self.stop_reason) and name == "SIGINT"
        self.request_stop(self.ending.on_signal(name))
        if is_second and self._main is not None:
            self._main.cancel()

    def request_stop(self, reason: str) -> None:
        """Stop after the current optimizer step."""
        if outranks(reason, self.stop_reason):
            self.stop_reason = reason
            self.training.phase = "stop after this step"
            self.parts.progress.note(f"{reason}: stopping after this step")
            self.works.bell.ring()

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

    async def _show(self) -> None:
        while True:
            self.parts.progress.refresh(self.training.snapshot())
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
