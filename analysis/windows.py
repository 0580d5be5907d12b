"""The beginning and the end of a run, side by side: what changed while it trained.

A window is the first or the last quarter of the trained steps. Numbers are of all its rollouts,
texts of a sample of whole groups, so that memory and time stay bounded. Means are over prompt
groups: completions of one prompt are alike, so they are no independent draws.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

import numpy as np

from analysis.export import FileRows, file_rows
from analysis.read_run import Evaluation, Run
from analysis.statistics import difference_interval
from llamarl_hpc.storage.rollout_store.layout import ENUMS, Block
from llamarl_hpc.types import Array

MAX_TEXTS = 2000  # of a window
_LENGTH = ENUMS["finish_reason"]["length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A mean over groups, early and late."""

    early: float
    late: float
    z: float  # of the difference; 0 where it cannot be told
    spread: float  # standard deviation over the early rollouts

    @property
    def rise(self) -> float:
        return self.late - self.early


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """A sample of a window's completions, whole groups. R of them."""

    texts: list[str] = field(default_factory=list)
    rollout_ids: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)  # group ids
    rewards: list[float] = field(default_factory=list)
    prompt_ids: list[str] = field(default_factory=list)
    answers: list[str | None] = field(default_factory=list)  # reference answers; None: unknown

    def paid(self) -> tuple[list[int], list[bool]]:
        """Indices of rollouts above or below the mean of their group, and which are above."""
        rewards, groups = np.array(self.rewards), np.array(self.groups)
        _, of = np.unique(groups, return_inverse=True)
        means = np.bincount(of, weights=rewards) / np.bincount(of) if len(of) else rewards
        above = rewards - means[of] if len(of) else rewards
        known = np.flatnonzero(np.abs(above) > 1e-9)
        return known.tolist(), (above[known] > 0).tolist()


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """The first and the last quarter of a run."""

    steps: tuple[tuple[int, int], tuple[int, int]]  # (first, last) of both
    num_groups: tuple[int, int]
    numbers: dict[str, Change]  # reward, length, truncated, rewards/<name>
    texts: tuple[Texts, Texts]
    all_texts: Texts  # from all over the run
    best_rollouts: list[int]  # ids of the best-paid late ones


def windows(run: Run) -> Windows | None:
    """None for a run of fewer than four trained steps."""
    mask = run.group_mask(purpose="train", status="trained")
    steps = np.unique(run.table("groups", ["step"], mask)["step"])
    if len(steps) < 4:
        return None
    quarter = len(steps) // 4
    early = (int(steps[0]), int(steps[quarter - 1]))
    late = (int(steps[-quarter]), int(steps[-1]))
    names = ["rollout_id", "group_id", "step", "reward", "completion_length", "finish_reason"]
    names += [f"rewards/{name}" for name in run.reward_names]
    rows = run.table("rollouts", names, mask)
    first, last = _between(rows, early), _between(rows, late)
    changes = {"reward": "reward", "length": "completion_length", "truncated": "truncated"}
    changes |= {name: name for name in names if name.startswith("rewards/")}
    best = np.argsort(-np.nan_to_num(last["reward"]), kind="stable")[:5]
    return Windows(
        steps=(early, late),
        num_groups=(_num_groups(first), _num_groups(last)),
        numbers={name: _change(first, last, column) for name, column in changes.items()},
        texts=(sample_texts(run, early), sample_texts(run, late)),
        all_texts=sample_texts(run, (early[0], late[1])),
        best_rollouts=last["rollout_id"][best].tolist(),
    )


def _between(rows: Block, window: tuple[int, int]) -> Block:
    inside = (rows["step"] >= window[0]) & (rows["step"] <= window[1])
    found = {name: values[inside] for name, values in rows.items()}
    found["truncated"] = (found["finish_reason"] == _LENGTH).astype(np.float64)
    return found


def _num_groups(rows: Block) -> int:
    return len(np.unique(rows["group_id"]))


def _change(early: Block, late: Block, column: str) -> Change:
    means = [_group_means(rows["group_id"], rows[column]) for rows in (early, late)]
    known = early[column][~np.isnan(early[column].astype(np.float64))]
    if not all(len(values) for values in means):
        return Change(early=math.nan, late=math.nan, z=0.0, spread=0.0)
    errors = [v.var(ddof=1) / len(v) if len(v) > 1 else math.inf for v in means]
    error = math.sqrt(sum(errors))
    rise = float(means[1].mean() - means[0].mean())
    # Two windows without any spread differ as surely as can be told.
    z = 0.0 if rise == 0.0 or math.isinf(error) else rise / max(error, 1e-12)
    return Change(
        early=float(means[0].mean()),
        late=float(means[1].mean()),
        z=float(np.clip(z, -1e6, 1e6)),
        spread=float(known.std()),
    )


def _group_means(groups: Array, values: Array) -> Array:
    known = ~np.isnan(values.astype(np.float64))
    _, of = np.unique(groups[known], return_inverse=True)
    if not len(of):
        return np.zeros(0)
    means: Array = np.bincount(of, weights=values[known]) / np.bincount(of)
    return means


# ---------------------------------------------------------------- texts


def sample_texts(run: Run, window: tuple[int, int]) -> Texts:
    """Completions of evenly chosen groups of some steps, `MAX_TEXTS` or a group more."""
    mask = run.group_mask(purpose="train", status="trained", steps=window)
    sizes = run.table("groups", ["num_rollouts"], mask)["num_rollouts"]
    every = max(1, math.ceil(int(sizes.sum()) / MAX_TEXTS))
    sample = Texts()
    seen = 0
    for rows in file_rows(run, purpose="train", status="trained", steps=window):
        groups = rows.column("rollouts/group")
        _, order = np.unique(groups, return_inverse=True)
        chosen = rows.rows[(order + seen) % every == 0]
        seen += int(order.max()) + 1
        if len(chosen):
            _add(run, FileRows(file=rows.file, rows=chosen), sample)
    return sample


def _add(run: Run, rows: FileRows, sample: Texts) -> None:
    sample.texts.extend(rows.texts())
    sample.rollout_ids.extend(rows.column("rollouts/rollout_id").tolist())
    sample.groups.extend(rows.column("rollouts/group_id").tolist())
    sample.rewards.extend(rows.column("rollouts/reward").tolist())
    names = rows.file.read("prompts/prompt_id")
    sample.prompt_ids.extend(names[row].decode() for row in rows.column("rollouts/prompt"))
    column = (run.config.get("data") or {}).get("answer") or "answer"
    for text in rows.data_rows():
        answer = json.loads(text or "{}").get(column)
        sample.answers.append(None if answer is None else str(answer))


# ---------------------------------------------------------------- held-out accuracy


@dataclass(frozen=True, kw_only=True, slots=True)
class AccuracyTrend:
    """Held-out accuracy at the beginning, at its best, and at the end."""

    first: float
    best: float
    best_version: int
    last: float
    gain: tuple[float, float]  # 95 % interval of last minus first
    fall_z: float  # of best minus last; high when it fell

    @property
    def is_better(self) -> bool:
        """The model learned what it is measured on, beyond noise."""
        return self.gain[0] > 0.0


def accuracy_trend(evaluations: list[Evaluation]) -> AccuracyTrend | None:
    """From the evaluations in the first and the last quarter of the versions; None for fewer than
    two."""
    if len(evaluations) < 2:
        return None
    first, last = evaluations[0].policy_version, evaluations[-1].policy_version
    quarter = (last - first) / 4
    early = _pooled([e for e in evaluations if e.policy_version <= first + quarter])
    late = _pooled([e for e in evaluations if e.policy_version >= last - quarter])
    best = max(evaluations, key=lambda e: e.accuracy)
    return AccuracyTrend(
        first=early[0] / early[1],
        best=best.accuracy,
        best_version=best.policy_version,
        last=late[0] / late[1],
        gain=difference_interval(early, late),
        fall_z=_proportion_z((best.num_correct, best.num_prompts), late),
    )


def _pooled(evaluations: list[Evaluation]) -> tuple[float, int]:
    correct = sum(e.num_correct for e in evaluations)
    return correct, max(sum(e.num_prompts for e in evaluations), 1)


def _proportion_z(a: tuple[float, int], b: tuple[float, int]) -> float:
    """z of the difference of two proportions (correct, total), a minus b."""
    share = (a[0] + b[0]) / (a[1] + b[1])
    error = math.sqrt(share * (1 - share) * (1 / a[1] + 1 / b[1]))
    return (a[0] / a[1] - b[0] / b[1]) / error if error > 0 else 0.0
