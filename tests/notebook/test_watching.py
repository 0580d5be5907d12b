"""When Slurm is asked while a run is watched, and what is shown in between."""

from __future__ import annotations

from typing import Any

import pytest

from llamarl_hpc.notebook import watching
from llamarl_hpc.notebook.status import Status
from llamarl_hpc.notebook.watching import Observer


class Folder:
    """A run whose folder and queue say what the test wants."""

    def __init__(self, job: dict[str, Any] | None) -> None:
        self.job, self.state, self.in_queue = job, "queued", "queued"
        self.component = "PENDING"
        self.asked = 0

    def status(self, *, ask_slurm: bool) -> Status:
        self.asked += ask_slurm
        job = self.job
        if job is not None and ask_slurm:
            job = {**job, "components": [{"name": "trainer", "state": self.component}]}
        reason = "a busy partition" if ask_slurm else ""
        state = self.in_queue if ask_slurm else self.state
        return Status({"state": state, "reason": reason, "job": job, "step": 0})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(watching.time, "monotonic", lambda: now[0])
    return now


def test_slurm_is_asked_now_and_then_and_its_answer_is_kept(clock: list[float]) -> None:
    folder = Folder({"job_id": "7", "components": []})
    look = Observer(folder.status)
    for _ in range(10):
        status, is_over = look()
        assert (status.reason, is_over) == ("a busy partition", False)
        assert status.job["components"] == [{"name": "trainer", "state": "PENDING"}]
        clock[0] += 2.0
    assert folder.asked == 2


def test_an_attempt_that_ended_is_no_end_while_its_job_goes_on(clock: list[float]) -> None:
    folder = Folder({"job_id": "7", "components": []})
    look = Observer(folder.status)
    look()
    folder.state, folder.in_queue = "stopped", "queued"  # requeued
    clock[0] += 3.0
    assert look()[1] is False and folder.asked == 2
    clock[0] += 1.0
    assert look()[1] is False and folder.asked == 2
    folder.in_queue, folder.component = "stopped", "COMPLETED"
    clock[0] += 1.5
    assert look()[1] is True and folder.asked == 3


def test_a_run_that_is_done_is_over_when_its_job_is(clock: list[float]) -> None:
    """`resume` refuses while Slurm still sees the job; a job that stays is left after a while."""
    folder = Folder({"job_id": "7", "components": []})
    folder.state = folder.in_queue = "done"
    folder.component = "RUNNING"
    look = Observer(folder.status)
    for _ in range(5):
        assert look()[1] is False
        clock[0] += 2.5
    folder.component = "COMPLETED"
    assert look()[1] is True
    folder.component, look = "COMPLETING", Observer(folder.status)
    assert look()[1] is False
    clock[0] += 121.0
    assert look()[1] is True


def test_without_a_job_the_folder_is_believed_at_once(clock: list[float]) -> None:
    folder = Folder(None)
    look = Observer(folder.status)
    assert look()[1] is False
    folder.state = "done"
    assert look()[1] is True and folder.asked == 0
