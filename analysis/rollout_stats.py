"""Figures over the rollouts of a run: by status, by staleness, over the steps. Plain numpy."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from analysis.read_run import Run
from llamarl_hpc.storage.rollout_store.layout import ENUMS, Block
from llamarl_hpc.types import Array

_LENGTH = ENUMS["finish_reason"]["length"]


def rollout_stats(run: Run, *, num_ranges: int = 8) -> dict[str, Any]:
    """Counts and means of the current lineage, ready for JSON.

    `by_steps` splits the trained steps into at most `num_ranges` ranges of equal length.
    """
    groups = run.table("groups", ["purpose", "status"])
    trained = run.group_mask(purpose="train", status="trained")
    names = ["step", "staleness", "reward", "completion_length", "finish_reason"]
    components = [f"rewards/{name}" for name in run.reward_names]
    rows = run.table("rollouts", [*names, *components], trained)
    statuses, counts = np.unique(groups["status"], return_counts=True)
    named = run.decoded("status", statuses)
    return {
        "run": str(run.dir.path),
        "groups": {name: int(count) for name, count in zip(named, counts, strict=True)},
        "trained_rollouts": len(rows["step"]),
        "trained_tokens": int(rows["completion_length"].sum()),
        "by_staleness": _by_staleness(rows),
        "by_steps": _by_steps(rows, num_ranges),
        "evaluations": [
            {
                "policy_version": e.policy_version,
                "accuracy": e.accuracy,
                "interval": list(e.interval),
                "num_prompts": e.num_prompts,
            }
            for e in run.evaluations()
        ],
    }


def zero_spread_share(run: Run) -> float:
    """Share of trained groups whose rewards were all equal: they gave no gradient."""
    mask = run.group_mask(status="trained")
    groups = run.table("groups", ["num_rollouts"], mask)["num_rollouts"]
    rewards = run.table("rollouts", ["reward"], mask)["reward"]
    groups = groups[groups > 0]
    if not len(groups):
        return float("nan")
    starts = np.cumsum(groups) - groups
    spread = np.maximum.reduceat(rewards, starts) - np.minimum.reduceat(rewards, starts)
    return float((spread == 0).mean())


def _by_staleness(rows: Block) -> list[dict[str, Any]]:
    return [
        {"staleness": int(value)} | _means(rows, rows["staleness"] == value)
        for value in np.unique(rows["staleness"])
    ]


def _by_steps(rows: Block, num_ranges: int) -> list[dict[str, Any]]:
    if not len(rows["step"]):
        return []
    first, last = int(rows["step"].min()), int(rows["step"].max())
    edges = np.unique(np.linspace(first, last + 1, num_ranges + 1).astype(int))
    return [
        {"first_step": int(a), "last_step": int(b) - 1}
        | _means(rows, (rows["step"] >= a) & (rows["step"] < b))
        for a, b in pairwise(edges)
    ]


def _means(rows: Block, mask: Array) -> dict[str, Any]:
    lengths, rewards = rows["completion_length"][mask], rows["reward"][mask]
    if not len(lengths):
        return {"rollouts": 0}
    found: dict[str, Any] = {
        "rollouts": len(lengths),
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "staleness_mean": float(rows["staleness"][mask].mean()),
        "staleness_max": int(rows["staleness"][mask].max()),
        "length_mean": float(lengths.mean()),
        "length_max": int(lengths.max()),
        "truncated_share": float((rows["finish_reason"][mask] == _LENGTH).mean()),
    }
    for name in rows:
        if name.startswith("rewards/"):
            values = rows[name][mask]
            known = values[~np.isnan(values)]
            found[f"{name}/mean"] = float(known.mean()) if len(known) else None
    return found
