"""Why an attempt ends before its last step, and what time is left for that.

    the job's end (Slurm is asked now and then: limits are cut and extended)  --.
    Slurm ends the job: requeue, preemption, node failure, scancel              |--> stop, after the
    SIGTERM or SIGUSR2 here, or at an executor (preemption signals steps only)  |    step and a
    the file `stop` in the run folder                                         --'    checkpoint

Where there is no time for that, `leave` ends it at once. A signal alone says only "soon": how much
time there is, and why, comes from Slurm.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llamarl_hpc.controller.deadline import Deadline
from llamarl_hpc.placement import role_of
from llamarl_hpc.slurm_text.job_end import PREEMPTED, JobNow

log = logging.getLogger(__name__)

Look = Callable[[], JobNow | None]  # asks Slurm, which may take a while
TIME_LIMIT, STOP_REQUEST = "the time limit", "a stop request"
_TICK_S = 1.0
_SLURMS = ("SIGTERM", "SIGUSR2")  # what Slurm sends, and may give the reason of
_SIGNALS = (*_SLURMS, "SIGINT", "SIGHUP")


def outranks(reason: str, before: str) -> bool:
    """Whether `reason` says better than `before` why an attempt ends: a person's wish says it best,
    and a signal's name gives way to what is behind it."""
    if STOP_REQUEST in (reason, before):
        return before != STOP_REQUEST
    return not before or (before.startswith(_SLURMS) and not reason.startswith(_SIGNALS))


@dataclass(frozen=True, kw_only=True)
class JobAround:
    """The Slurm job that the attempt runs in."""

    look: Look
    kill_wait_s: float  # from SIGTERM to SIGKILL when Slurm ends a job
    component_names: tuple[str, ...] = ()


class Ending:
    """`stop(why)` asks for an end after this step, `leave(why)` for one now; both may be called
    again. `is_saving` and `is_waiting` tell what the controller is at."""

    def __init__(
        self,
        deadline: Deadline,
        *,
        job: JobAround | None,
        poll_s: float,
        stop_file: Path,
        stop: Callable[[str], None],
        leave: Callable[[str], None],
        is_saving: Callable[[], bool],
        is_waiting: Callable[[], bool],
    ) -> None:
        self.deadline, self.job, self.stop_file = deadline, job, stop_file
        self.poll_s = poll_s  # between looks at Slurm
        self.stop, self.leave = stop, leave
        self.is_saving, self.is_waiting = is_saving, is_waiting
        self.ending = ""  # why Slurm ends the job; empty while it does not
        self._signalled: dict[str, str] = {}  # executor -> signal, not looked into yet
        self._look_now = asyncio.Event()
        self._next_look = -math.inf

    # ------------------------------------------------------------------ signs

    def on_signal(self, name: str) -> str:
        """A signal came here. Returns the reason for it, as far as it is known by now: `cancel`
        makes the stop file before it signals."""
        self.look_soon()
        return STOP_REQUEST if self.stop_file.exists() else name

    def look_soon(self) -> None:
        """Something happened for which Slurm may know the reason."""
        self._look_now.set()

    def on_executor_signal(self, executor: str, name: str) -> None:
        """A rank got a signal that it ignores."""
        log.info("%s got %s", executor, name)
        self._signalled[executor] = name
        self.look_soon()

    async def is_over(self) -> bool:
        """Whether Slurm ends the job, asked now."""
        await self._ask()
        return bool(self.ending)

    # ------------------------------------------------------------------ watching

    async def watch(self) -> None:
        """Runs for ever."""
        while True:
            if self._look_now.is_set() or time.monotonic() >= self._next_look:
                self._look_now.clear()
                await self._ask()
                self._consider_signals()
            self.consider()
            try:
                async with asyncio.timeout(min(_TICK_S, self.poll_s)):
                    await self._look_now.wait()
            except TimeoutError:
                continue

    async def _ask(self) -> None:
        self._next_look = time.monotonic() + self.poll_s
        now = await asyncio.to_thread(self.job.look) if self.job is not None else None
        if now is not None:
            self._note(now)

    def _note(self, now: JobNow) -> None:
        assert self.job is not None
        if now.ending:
            if not self.ending:
                log.warning("Slurm ends the job: %s", now.ending)
                self.ending = now.ending
                self.deadline.end = time.monotonic() + self.job.kill_wait_s
            self.stop(now.ending)
            return
        left = math.inf if now.end is None else now.end - time.time()
        self.deadline.end = time.monotonic() + left
        if now.preempted:
            self.stop(PREEMPTED)
        for component, why in now.lost.items():
            names = dict(enumerate(self.job.component_names))
            self.stop(f"{why} of component {component} ({names.get(component, '?')})")

    def _consider_signals(self) -> None:
        """Without a reason from Slurm, a signal to a replica is that replica's own affair: it is
        being ended. Without the trainer there is no run."""
        signalled, self._signalled = self._signalled, {}
        for executor, name in signalled.items():
            if role_of(executor) == "trainer":
                self.stop(f"{name} to {executor}")

    def consider(self) -> None:
        """Look at the clock and at the stop file."""
        now = time.monotonic()
        if self.stop_file.exists():
            self.stop(STOP_REQUEST)
        if self.deadline.is_over(now) or not (
            self.is_saving() or self.deadline.fits_checkpoint(now)
        ):
            self.leave(self.ending or TIME_LIMIT)
        elif self.is_waiting() and not self.deadline.fits_training(now):
            self.stop(TIME_LIMIT)
