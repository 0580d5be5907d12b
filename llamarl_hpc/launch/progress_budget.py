"""How many attempts in a row got nowhere: pure, over the attempts in run.json.

An attempt got further if the next one could begin at a later step than it had begun itself: steps
without a checkpoint are made again. An attempt that a person started opens the account anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamarl_hpc.errors import NoProgress

Attempt = Mapping[str, Any]  # an entry of "attempts" in run.json


def without_progress(attempts: Sequence[Attempt], newest_step: int) -> list[Attempt]:
    """The latest attempts that made no progress, oldest first. `newest_step`: of the newest
    checkpoint, 0 without one."""
    fruitless: list[Attempt] = []
    reached = newest_step
    for attempt in reversed(attempts):
        begun = attempt.get("resumed_from_step")
        if begun is not None and begun < reached:
            break
        fruitless.insert(0, attempt)
        reached = min(reached, reached if begun is None else begun)
        if not attempt.get("started_by"):
            break
    return fruitless


def check_budget(attempts: Sequence[Attempt], newest_step: int, limit: int) -> None:
    """Raise NoProgress, with what ended the latest attempts, once `limit` of them got nowhere."""
    fruitless = without_progress(attempts, newest_step)
    if len(fruitless) < limit:
        return
    reasons = "; ".join(f"attempt {a['number']}: {_reason(a)}" for a in fruitless[-3:])
    raise NoProgress(
        f"{len(fruitless)} attempts in a row made no progress beyond step {newest_step} "
        f"(launch.max_attempts_without_progress), so the run is not continued: {reasons}"
    )


def _reason(attempt: Attempt) -> str:
    if attempt.get("outcome") == "running":
        return "ended without a word"
    text = str(attempt.get("reason", "")) or str(attempt.get("outcome", ""))
    return text.splitlines()[0]
