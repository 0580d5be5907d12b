"""Signals, looks at Slurm and the stop file: each stops an attempt once, with its reason."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from llamarl_hpc.controller.deadline import LEAVE_S, Deadline
from llamarl_hpc.controller.ending import Ending, JobAround, outranks
from llamarl_hpc.slurm_text.job_end import JobNow


class Scene:
    """`now` is what Slurm says."""

    def __init__(self, folder: Path, *, in_job: bool = True) -> None:
        self.now: JobNow | None = JobNow(end=time.time() + 1000.0)
        self.looks = 0
        self.stops: list[str] = []
        self.leaves: list[str] = []
        self.saving = self.waiting = False
        job = JobAround(look=self._look, kill_wait_s=30.0, component_names=("trainer", "generator"))
        self.ending = Ending(
            Deadline(margin_s=10.0),
            job=job if in_job else None,
            poll_s=30.0,
            stop_file=folder / "stop",
            stop=self.stops.append,
            leave=self.leaves.append,
            is_saving=lambda: self.saving,
            is_waiting=lambda: self.waiting,
        )

    def _look(self) -> JobNow | None:
        self.looks += 1
        return self.now

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.ending.watch())
        async with asyncio.timeout(10.0):
            while self.ending.job is not None and not self.looks:
                await asyncio.sleep(0.01)
            yield
        task.cancel()

    async def until_look(self) -> None:
        before = self.looks
        while self.looks == before:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)

    def left_s(self) -> float:
        return self.ending.deadline.end - time.monotonic()


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


async def test_limits_that_operators_move_are_followed(scene: Scene) -> None:
    async with scene.watching():
        await asyncio.sleep(0.05)
        assert scene.left_s() == pytest.approx(1000.0, abs=5.0)
        for end, left in ((time.time() + 5000.0, 5000.0), (None, float("inf"))):
            scene.now = JobNow(end=end)
            scene.ending.look_soon()
            await scene.until_look()
            assert scene.left_s() == pytest.approx(left, abs=5.0)
        scene.now = None  # no answer: what was known stays
        scene.ending.look_soon()
        await scene.until_look()
        assert scene.left_s() == float("inf")
    assert (scene.stops, scene.leaves) == ([], [])


async def test_a_signal_to_the_trainer_stops_the_attempt_and_one_to_a_replica_does_not(
    scene: Scene,
) -> None:
    async with scene.watching():
        scene.ending.on_executor_signal("generator.1", "SIGTERM")
        await scene.until_look()
        assert scene.stops == []
        scene.ending.on_executor_signal("trainer", "SIGTERM")
        scene.ending.on_executor_signal("trainer", "SIGUSR2")
        await scene.until_look()
        assert scene.stops == ["SIGUSR2 to trainer"]


async def test_preemption_that_signals_steps_alone_is_recognised(scene: Scene) -> None:
    async with scene.watching():
        scene.now = JobNow(end=time.time() + 25.0, preempted=True)
        scene.ending.on_executor_signal("generator.0", "SIGTERM")
        await scene.until_look()
        assert scene.stops[0] == "preemption"
        assert scene.left_s() == pytest.approx(25.0, abs=2.0)
        assert scene.leaves == []


async def test_a_job_that_slurm_ends_has_the_time_until_it_is_killed(scene: Scene) -> None:
    async with scene.watching():
        scene.now = JobNow(end=None, ending="requeue")
        scene.ending.look_soon()
        await scene.until_look()
        assert scene.stops[0] == "requeue"
        assert scene.left_s() == pytest.approx(30.0, abs=2.0)
        assert await scene.ending.is_over()


async def test_a_component_that_is_gone_is_named(scene: Scene) -> None:
    async with scene.watching():
        scene.now = JobNow(end=None, lost={1: "cancellation"})
        scene.ending.look_soon()
        await scene.until_look()
    assert scene.stops[0] == "cancellation of component 1 (generator)"


async def test_the_stop_file_stops_an_attempt_also_outside_slurm(tmp_path: Path) -> None:
    scene = Scene(tmp_path, in_job=False)
    (tmp_path / "stop").touch()
    async with scene.watching():
        while not scene.stops:
            await asyncio.sleep(0.01)
    assert scene.stops[0] == "a stop request"


def test_a_step_that_cannot_end_in_time_is_abandoned_but_not_a_checkpoint(scene: Scene) -> None:
    deadline = scene.ending.deadline
    deadline.pace.checkpoint_s = 20.0
    deadline.end = time.monotonic() + 100.0
    scene.ending.consider()
    scene.waiting = True
    deadline.end = time.monotonic() + 20.0 + LEAVE_S + 10.0 - 1.0  # 10 of margin
    scene.ending.consider()
    assert (scene.stops, scene.leaves) == (["the time limit"], [])
    scene.waiting, scene.saving = False, True
    deadline.end = time.monotonic() + 20.0 + LEAVE_S - 1.0
    scene.ending.consider()
    assert scene.leaves == []
    scene.saving = False
    scene.ending.consider()
    assert scene.leaves == ["the time limit"]


def test_a_signal_after_the_stop_file_is_a_stop_request(scene: Scene, tmp_path: Path) -> None:
    assert scene.ending.on_signal("SIGUSR2") == "SIGUSR2"
    (tmp_path / "stop").touch()
    assert scene.ending.on_signal("SIGUSR2") == "a stop request"


@pytest.mark.parametrize(
    ("before", "reason", "is_better"),
    [
        ("", "SIGTERM", True),
        ("SIGTERM", "SIGUSR2", False),
        ("SIGTERM", "preemption", True),
        ("SIGTERM to trainer", "requeue", True),
        ("preemption", "SIGTERM", False),
        ("SIGINT", "the time limit", False),
        ("the time limit", "a stop request", True),
        ("SIGINT", "a stop request", True),
        ("a stop request", "a stop request", False),
        ("a stop request", "cancellation", False),
    ],
)
def test_why_an_attempt_ends_is_said_by_the_best_reason(
    before: str, reason: str, is_better: bool
) -> None:
    assert outranks(reason, before) is is_better
