"""Which rows count when a run was resumed: pure functions of values.

An attempt that resumed from step s threw away what earlier attempts had trained at step s and
later. Their rows stay in the store for ever; here they are told apart, so that a group trained
once is seen once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamarl_hpc.storage.rollout_store.layout import ENUMS, Block
from llamarl_hpc.types import Array

_NEVER = np.iinfo(np.int64).max
TRAIN, EVAL = ENUMS["purpose"]["train"], ENUMS["purpose"]["eval"]
TRAINED = ENUMS["status"]["trained"]


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
    lost, least = {}, _NEVER
    for attempt in sorted(attempts, key=lambda a: a.number, reverse=True):
        lost[attempt.number] = least
        if attempt.resumed_from_step is not None:
            least = min(least, attempt.resumed_from_step)
    return lost


def current_groups(groups: Block, attempts: Sequence[Attempt]) -> Array:
    """bool [G]: rows that say what became of their group, as the run stands now.

    `groups` holds the columns purpose, group_id, attempt, issue, status, step, t_resolved [G].
    A group that was trained twice within the lineage keeps both rows: that is a fault, and the
    accounting must see it.
    """
    lost = first_lost_step(attempts)
    numbers = groups["attempt"]
    limit = np.full(len(numbers), _NEVER, dtype=np.int64)
    for number in np.unique(numbers):
        limit[numbers == number] = lost.get(int(number), _NEVER)
    # Step s makes version s + 1; an evaluation of version s, from which a resume started, counts.
    evaluated = groups["purpose"] == EVAL
    valid = groups["step"] < np.where(evaluated & (limit < _NEVER), limit + 1, limit)
    trained = valid & (groups["status"] == TRAINED)
    keys = [
        groups["purpose"],
        groups["group_id"],
        np.where(evaluated, groups["step"], -1),
    ]
    order = np.lexsort(
        (groups["t_resolved"], groups["issue"], numbers, trained, valid, *reversed(keys))
    )
    sorted_keys = np.stack([key[order] for key in keys])
    is_last = np.ones(len(order), dtype=bool)
    is_last[:-1] = (sorted_keys[:, 1:] != sorted_keys[:, :-1]).any(axis=0)
    current = np.zeros(len(order), dtype=bool)
    current[order] = is_last
    result: Array = (current | trained) & valid
    return result


def current_metrics(
    rows: Iterable[dict[str, Any]], attempts: Sequence[Attempt]
) -> list[dict[str, Any]]:
    """Step lines of metrics.jsonl that count, by step: each step once."""
    lost, found = first_lost_step(attempts), dict[int, dict[str, Any]]()
    for row in rows:
        if isinstance(row.get("step"), int) and row["step"] < lost.get(
            row.get("attempt", 0), _NEVER
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
            if version <= lost.get(row.get("attempt", 0), _NEVER):
                found[version] = row
    return [found[version] for version in sorted(found)]
