"""Which lines count when a run was resumed: pure functions of values.

An attempt that resumed from step s threw away what earlier attempts had trained at step s and
later. Their rows stay for ever; here they are told apart, so that a step is seen once. The rows of
the rollout store: `current_groups.py`. Nothing heavy is loaded, because `status` reads this way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

NEVER = 2**63 - 1  # above every step; the largest int64


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One start of the run, as run.json tells it."""

    number: int
    resumed_from_step: int | None = None  # None: not known yet
    started: float = 0.0
    ended: float | None = None
    outcome: str = ""  # done, failed, stopped; empty while it runs, or when it was killed
    reason: str = ""
    host: str = ""
    max_staleness: int | None = None  # the bound it kept; None: the config's

    @classmethod
    def from_info(cls, entry: dict[str, Any]) -> Attempt:
        known = {key: entry[key] for key in cls.__dataclass_fields__ if entry.get(key) is not None}
        return cls(**known)


def first_lost_step(attempts: Sequence[Attempt]) -> dict[int, int]:
    """For each attempt the first step of it that a later attempt did not build on."""
    lost, least = {}, NEVER
    for attempt in sorted(attempts, key=lambda a: a.number, reverse=True):
        lost[attempt.number] = least
        if attempt.resumed_from_step is not None:
            least = min(least, attempt.resumed_from_step)
    return lost


def current_metrics(
    rows: Iterable[dict[str, Any]], attempts: Sequence[Attempt]
) -> list[dict[str, Any]]:
    """Step lines of metrics.jsonl that count, by step: each step once."""
    lost, found = first_lost_step(attempts), dict[int, dict[str, Any]]()
    for row in rows:
        if isinstance(row.get("step"), int) and row["step"] < lost.get(
            row.get("attempt", 0), NEVER
        ):
            found[row["step"]] = row
    return [found[step] for step in sorted(found)]


def current_events(
    rows: Iterable[dict[str, Any]], attempts: Sequence[Attempt], event: str
) -> list[dict[str, Any]]:
    """Event lines of metrics.jsonl that count, by policy version: each version once."""
    lost, found = first_lost_step(attempts), dict[int, dict[str, Any]]()
    for row in rows:
        if row.get("event") == event and isinstance(row.get("policy_version"), int):
            version = row["policy_version"]
            if version <= lost.get(row.get("attempt", 0), NEVER):
                found[version] = row
    return [found[version] for version in sorted(found)]
