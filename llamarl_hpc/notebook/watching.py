"""Looking at a run again and again: when to ask Slurm, and what to show.

The run folder is read every time. The queue is everybody's: it is asked now and then, and when the
folder says that an attempt has ended, for then the job may be over, or about to continue the run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from llamarl_hpc.notebook.status import Status
from llamarl_hpc.notebook.views import Slot
from llamarl_hpc.slurm_text.job_state import is_final

_ASK_S = 15.0
_ASK_AT_AN_END_S = 2.0
_CLOSING_S = 120.0  # for which Slurm may take longer than the run to see its end


class Observer:
    """`observer()` is the status now, and whether it is the last one."""

    def __init__(self, status: Callable[..., Status]) -> None:
        """`status` takes `ask_slurm`."""
        self._status = status
        self._asked = -_ASK_S
        self._known: Status | None = None  # when Slurm was asked
        self._ended: float | None = None  # when an end was first seen

    def __call__(self) -> tuple[Status, bool]:
        status = self._status(ask_slurm=False)
        if status.job is None:
            return status, status.has_ended
        pause_s = _ASK_AT_AN_END_S if status.has_ended else _ASK_S
        if time.monotonic() - self._asked > pause_s:
            self._known, self._asked = self._status(ask_slurm=True), time.monotonic()
            return self._known, self._is_over(self._known)
        return self._completed(status), False

    def _is_over(self, status: Status) -> bool:
        """Nothing goes on in Slurm, either: a job that does would refuse what comes next, `resume`
        for one."""
        if not status.has_ended:
            self._ended = None
            return False
        now = time.monotonic()
        self._ended = now if self._ended is None else self._ended
        states = [part["state"] for part in status.job["components"]]
        return all(is_final(state) for state in states) or now - self._ended > _CLOSING_S

    def _completed(self, status: Status) -> Status:
        """With what Slurm said last, so that a table does not flicker."""
        known = self._known
        if known is None or known.job is None or known.job["job_id"] != status.job["job_id"]:
            return status
        figures = {**status.figures, "job": known.job}
        if status.state == known.state:
            figures["reason"] = known.reason
        return Status(figures)


class Cell:
    """Two places in the output of a cell: status and curves."""

    def __init__(self, figure: Callable[[], object]) -> None:
        self._figure = figure
        self._table, self._picture = Slot(), Slot()

    def __call__(self, status: Status) -> None:
        self._table.show(status)
        self._picture.show(self._figure())


class Lines:
    """One line whenever a step is done or the state changes."""

    def __init__(self) -> None:
        self._last: tuple[str, int] | None = None

    def __call__(self, status: Status) -> None:
        if self._last != (status.state, status.step):
            self._last = (status.state, status.step)
            reward = "" if status.reward is None else f"  reward {status.reward:.3f}"
            sys.stdout.write(f"{status.state}  {status.step} of {status.max_steps} steps{reward}\n")
