"""Another reward over the same rollouts: groups as a reward function sees them, and what changes.

The scoring itself is not done here: whoever has a reward feeds `Rescoring`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from analysis.export import file_rows
from analysis.read_run import Run
from llamarl_hpc.types import Array

_SIGN = 1e-9  # an advantage closer to 0 than this counts as 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredGroup:
    """Completions of one prompt. R of them."""

    step: int
    group_id: int
    prompt: str
    columns: dict[str, Any]  # the data row
    completions: list[str]  # [R]
    rollout_ids: list[int]  # [R]
    rewards: list[float]  # [R], as the run gave them


def stored_groups(run: Run, **filters: Any) -> Iterator[StoredGroup]:
    """Groups that fit (`Run.group_mask`) and have completions, file by file."""
    for rows in file_rows(run, **filters):
        names = ("group", "step", "group_id", "rollout_id", "reward")
        columns = {name: rows.column(f"rollouts/{name}").tolist() for name in names}
        texts, prompts, data = rows.texts(), rows.prompts(), rows.data_rows()
        for _, members in groupby(range(len(texts)), key=columns["group"].__getitem__):
            chosen = list(members)
            first = chosen[0]
            yield StoredGroup(
                step=columns["step"][first],
                group_id=columns["group_id"][first],
                prompt=prompts[first],
                columns=json.loads(data[first] or "{}"),
                completions=[texts[i] for i in chosen],
                rollout_ids=[columns["rollout_id"][i] for i in chosen],
                rewards=[columns["reward"][i] for i in chosen],
            )


@dataclass
class Rescoring:
    """Collects old and new rewards; `figures` says what the new one would have changed."""

    names: list[str]  # of the new components
    num_failed: int = 0  # groups that could not be scored; they are left out
    first_error: str = ""
    _rows: list[dict[str, Array]] = field(default_factory=list)

    def add(
        self, group: StoredGroup, new: Sequence[float], components: Sequence[Sequence[float | None]]
    ) -> None:
        """`new` [R] is the total, `components` [component][R]; None where one does not apply."""
        old = np.array(group.rewards, dtype=np.float64)
        total = np.array(new, dtype=np.float64)
        row = {
            "step": np.full(len(old), group.step),
            "rollout_id": np.array(group.rollout_ids, dtype=np.int64),
            "old": old,
            "new": total,
            "turned": _sign(old) != _sign(total),
        }
        parts = zip(self.names, components, strict=True)
        row |= {f"rewards/{n}": np.array(values, dtype=np.float64) for n, values in parts}
        self._rows.append(row)

    def failed(self, error: str) -> None:
        self.num_failed += 1
        self.first_error = self.first_error or error

    def columns(self) -> dict[str, Array]:
        """step, rollout_id, old, new, turned and the components, [R] each."""
        if not self._rows:
            return {}
        return {name: np.concatenate([r[name] for r in self._rows]) for name in self._rows[0]}

    def figures(self) -> dict[str, Any]:
        """Ready for JSON: over everything, and by step."""
        columns = self.columns()
        steps = np.unique(columns["step"]).tolist() if columns else []
        return {
            "rewards": self.names,
            "groups_not_scored": self.num_failed,
            "whole": compare(columns) if columns else {"rollouts": 0},
            "by_step": [{"step": s} | compare(columns, columns["step"] == s) for s in steps],
        }


def compare(columns: dict[str, Array], mask: Array | None = None) -> dict[str, Any]:
    """Old reward against new over some rollouts.

    `changed_share`: rollouts with another reward. `turned_share`: rollouts that would have been
    pushed the other way (above, at, or below the mean of their group). `correlation` is Pearson's;
    None where one of both does not vary.
    """
    rows = columns if mask is None else {name: values[mask] for name, values in columns.items()}
    known = ~np.isnan(rows["old"])
    old, new = rows["old"][known], rows["new"][known]
    if not len(old):
        return {"rollouts": 0}
    varies = len(old) > 1 and np.ptp(old) > 0 and np.ptp(new) > 0
    components = {
        f"{name}/mean": _mean(values) for name, values in rows.items() if name.startswith("rewards")
    }
    return {
        "rollouts": len(old),
        "old_mean": float(old.mean()),
        "new_mean": float(new.mean()),
        "changed_share": float((~np.isclose(old, new, rtol=0.0, atol=1e-9)).mean()),
        "turned_share": float(rows["turned"][known].mean()),
        "correlation": float(np.corrcoef(old, new)[0, 1]) if varies else None,
    } | components


def _sign(rewards: Array) -> Array:
    above = rewards - rewards.mean()
    signs: Array = np.sign(np.where(np.abs(above) < _SIGN, 0.0, above))
    return signs


def _mean(values: Array) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None
