"""What a stop would take now, and what Slurm leaves for it.

    signal --(launch.signal_delay_s)--> end of the job      the time limit
    signal --(KillWait)--> kill                             requeue, preemption, scancel

The controller looks at the job's end itself and begins in time (`deadline.py`), so that the signal
is the second net; and what a checkpoint that cannot be finished loses is made again. But whoever
set these times should know when they are too short, and once is enough.
"""

from __future__ import annotations

import logging
import math

from llamarl_hpc.controller.deadline import LEAVE_S, Pace

log = logging.getLogger(__name__)


class Grace:
    """Of one attempt. `kill_wait_s`: None outside Slurm, where nobody ends a run in a hurry."""

    def __init__(self, pace: Pace, *, signal_delay_s: float, kill_wait_s: float | None) -> None:
        self._pace, self._delay_s, self._kill_wait_s = pace, signal_delay_s, kill_wait_s
        self._told: set[str] = set()

    @property
    def stop_s(self) -> float:
        """Seconds from a signal until a checkpoint is on disk: the step that is under way, and the
        checkpoint, as long as they took lately."""
        return self._pace.training_s + self._pace.checkpoint_s

    def consider(self) -> None:
        """Tell what does not fit, once a checkpoint was measured or estimated; each thing once."""
        checkpoint_s, kill_wait_s = self._pace.checkpoint_s, self._kill_wait_s
        if not checkpoint_s or kill_wait_s is None:
            return
        needed_s = self.stop_s + LEAVE_S
        if needed_s > self._delay_s and "signal" not in self._told:
            self._told.add("signal")
            log.warning(
                "a step, a checkpoint and leaving take %.0f s, but launch.signal_delay_s lets "
                "Slurm signal only %.0f s before the job's end: raise it to %d or more",
                needed_s,
                self._delay_s,
                60 * math.ceil(needed_s * 1.5 / 60),
            )
        if checkpoint_s + LEAVE_S > kill_wait_s and "kill" not in self._told:
            self._told.add("kill")
            log.info(
                "a checkpoint and leaving take %.0f s, but Slurm kills %.0f s (KillWait) after it "
                "requeues, preempts or cancels a job: the steps since the newest checkpoint would "
                "then be made again (trainer.save_steps)",
                checkpoint_s + LEAVE_S,
                kill_wait_s,
            )
