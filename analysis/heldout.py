"""Held-out questions one by one: who answered what, and what changed between two evaluations.

Two evaluations ask the same questions, so their difference is taken question by question: that
interval is narrower than one of two independent samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from analysis.read_run import Run
from analysis.statistics import mean_half_width
from llamarl_hpc.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

_GRADE = "rewards/math_answer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Of the mean score, over the questions that both evaluations asked."""

    num_questions: int
    before: float
    after: float
    low: float  # 95 % interval of after - before; NaN for fewer than two questions
    high: float
    better: int  # questions whose score rose
    worse: int  # questions whose score fell

    @property
    def mean(self) -> float:
        return self.after - self.before

    def __str__(self) -> str:
        return (
            f"{self.before:.3f} -> {self.after:.3f}, change {self.mean:+.3f} "
            f"(95 %: {self.low:+.3f} to {self.high:+.3f}) over {self.num_questions} questions: "
            f"{self.better} better, {self.worse} worse"
        )


def answers(run: Run, version: int | None = None) -> pd.DataFrame:
    """One evaluation (default: the newest), a row for each question: prompt, completion (the
    first), score (mean over completions of the math answer, or of the reward where there is none).

    Raises ConfigError when there is no such evaluation.
    """
    versions = [e.policy_version for e in run.evaluations()]
    if not versions:
        raise ConfigError(f"{run.dir.path} has no evaluation")
    wanted = versions[-1] if version is None else version
    if wanted not in versions:
        found = ", ".join(map(str, versions))
        raise ConfigError(f"there is no evaluation of version {version}; evaluated were {found}")
    rows = run.rollouts(purpose="eval", steps=(wanted, wanted), text=True)
    rows["score"] = rows[_GRADE] if _GRADE in rows else rows["reward"]
    columns = {"prompt": "first", "completion": "first", "score": "mean"}
    return rows.groupby("prompt_id", sort=False).agg(columns)


def change(before: pd.DataFrame, after: pd.DataFrame) -> Change:
    """Between two tables of `answers`, of one run or of two."""
    both = before["score"].to_frame("before").join(after["score"].rename("after"), how="inner")
    both = both.dropna()
    rise = both["after"] - both["before"]
    half = mean_half_width(float(rise.std()), len(rise))
    return Change(
        num_questions=len(rise),
        before=float(both["before"].mean()),
        after=float(both["after"].mean()),
        low=float(rise.mean()) - half,
        high=float(rise.mean()) + half,
        better=int((rise > 0).sum()),
        worse=int((rise < 0).sum()),
    )
