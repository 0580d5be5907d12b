"""How long an attempt may go on: pure, over the end of its job and what steps took so far.

                       now                                                     end of the job
    begin a step?       |--- a step ---|- checkpoint -|- leave -|---- margin ----|
    go at once?         |- checkpoint -|- leave -|

Durations are the longest of the last few, so one slow step is not the last one's undoing.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

_REMEMBERED = 5
LEAVE_S = 10.0  # to end the executors and tell Slurm how to go on


@dataclass
class Pace:
    """Measured durations, in seconds; 0 before anything was measured."""

    steps: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    trainings: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    checkpoint_s: float = 0.0

    @property
    def step_s(self) -> float:
        """From the end of one optimizer step to that of the next."""
        return max(self.steps, default=0.0)

    @property
    def training_s(self) -> float:
        """Of this the trainer's part, once it has its batch."""
        return max(self.trainings, default=0.0)


@dataclass
class Deadline:
    """`end` is in seconds of the caller's clock; infinity without a limit."""

    margin_s: float
    pace: Pace = field(default_factory=Pace)
    end: float = math.inf

    def fits_step(self, now: float) -> bool:
        """Whether one more step, with its batch still to come, and a checkpoint fit."""
        return self.fits_checkpoint(now + self.pace.step_s + self.margin_s)

    def fits_training(self, now: float) -> bool:
        """The same for a step whose batch is all but there."""
        return self.fits_checkpoint(now + self.pace.training_s + self.margin_s)

    def fits_checkpoint(self, now: float) -> bool:
        """Whether there is time for a checkpoint, and to leave. Not: go at once."""
        checkpoint_s = self.pace.checkpoint_s or self.pace.step_s  # not measured: a guess
        return now + checkpoint_s + LEAVE_S <= self.end

    def is_over(self, now: float) -> bool:
        """Whether even what is under way must be left."""
        return now + LEAVE_S / 2 > self.end
