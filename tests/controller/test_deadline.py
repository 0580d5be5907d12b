"""Whether another step fits before the job's end, from what steps and checkpoints took."""

from __future__ import annotations

import math

from llamarl_hpc.controller.deadline import LEAVE_S, Deadline


def measured() -> Deadline:
    deadline = Deadline(margin_s=30.0, end=120.0)
    deadline.pace.steps.extend([20.0, 30.0, 25.0])
    deadline.pace.trainings.extend([8.0, 10.0])
    deadline.pace.checkpoint_s = 20.0
    return deadline


def test_the_last_step_begins_while_it_a_checkpoint_and_the_margin_fit() -> None:
    deadline = measured()
    last = 120.0 - 30.0 - 30.0 - 20.0 - LEAVE_S
    assert deadline.fits_step(last) and not deadline.fits_step(last + 0.1)
    assert deadline.fits_training(last + 20.0) and not deadline.fits_training(last + 20.1)


def test_without_time_for_a_checkpoint_it_is_time_to_go() -> None:
    deadline = measured()
    last = 120.0 - 20.0 - LEAVE_S
    assert deadline.fits_checkpoint(last) and not deadline.fits_checkpoint(last + 0.1)
    assert not deadline.is_over(last + 0.1)  # a checkpoint that has begun may still end
    assert deadline.is_over(118.0)


def test_a_step_that_was_slow_once_is_forgotten_after_five() -> None:
    deadline = measured()
    deadline.pace.steps.extend([1.0, 2.0, 3.0, 4.0, 5.0])
    assert deadline.pace.step_s == 5.0


def test_before_anything_is_measured_a_checkpoint_is_taken_for_as_long_as_a_step() -> None:
    deadline = Deadline(margin_s=0.0, end=100.0)
    deadline.pace.steps.append(40.0)
    last = 100.0 - 40.0 - LEAVE_S
    assert deadline.fits_checkpoint(last) and not deadline.fits_checkpoint(last + 0.1)


def test_without_an_end_everything_fits() -> None:
    deadline = Deadline(margin_s=60.0)
    assert deadline.end == math.inf
    assert deadline.fits_step(1e12) and not deadline.is_over(1e12)
