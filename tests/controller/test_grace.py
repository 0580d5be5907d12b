"""What a stop takes is held against what Slurm leaves for it, and told once."""

from __future__ import annotations

import logging

import pytest

from llamarl_hpc.controller.deadline import Pace
from llamarl_hpc.controller.grace import Grace


def pace(*, training_s: float, checkpoint_s: float) -> Pace:
    found = Pace(checkpoint_s=checkpoint_s)
    found.trainings.append(training_s)
    return found


def test_a_stop_is_a_step_and_a_checkpoint() -> None:
    measured = pace(training_s=12.0, checkpoint_s=30.0)
    assert Grace(measured, signal_delay_s=1.0, kill_wait_s=None).stop_s == 42.0


@pytest.mark.parametrize(
    ("training_s", "checkpoint_s", "told"),
    [
        (5.0, 15.0, []),
        (5.0, 25.0, [("INFO", "take 35 s, but Slurm kills 30 s (KillWait)")]),
        (150.0, 20.0, []),  # 180 s: just in time
        (
            150.0,
            60.0,
            [
                ("WARNING", "take 220 s, but launch.signal_delay_s lets Slurm signal only 180 s"),
                ("INFO", "take 70 s, but Slurm kills 30 s (KillWait)"),
            ],
        ),
        (900.0, 0.0, []),  # no checkpoint was made, and none is large
    ],
)
def test_what_does_not_fit_is_told_once(
    caplog: pytest.LogCaptureFixture,
    training_s: float,
    checkpoint_s: float,
    told: list[tuple[str, str]],
) -> None:
    caplog.set_level(logging.INFO, logger="llamarl_hpc")
    measured = pace(training_s=training_s, checkpoint_s=checkpoint_s)
    grace = Grace(measured, signal_delay_s=180.0, kill_wait_s=30.0)
    for _ in range(3):
        grace.consider()
    assert [record.levelname for record in caplog.records] == [level for level, _ in told]
    for record, (_, words) in zip(caplog.records, told, strict=True):
        assert words in record.getMessage()
    if training_s == 150.0 and checkpoint_s == 60.0:
        assert caplog.records[0].getMessage().endswith("raise it to 360 or more")


def test_outside_slurm_there_is_nothing_to_tell(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="llamarl_hpc")
    measured = pace(training_s=1e4, checkpoint_s=1e4)
    Grace(measured, signal_delay_s=1.0, kill_wait_s=None).consider()
    assert caplog.records == []
