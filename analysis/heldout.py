"""Held-out questions one by one: who answered what, and what changed between two evaluations.

Two evaluations ask the same questions, so their difference is taken question by question: that
interval is narrower than one of two independent samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from analysis.read_run import Run
from analysis.rollout_view import question
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
        if not self.num_questions:
            return "the two have no question in common"
        return (
            f"{self.before:.3f} -> {self.after:.3f}, change {self.mean:+.3f} "
            f"(95 %: {self.low:+.3f} to {self.high:+.3f}) over {self.num_questions} questions: "
            f"{self.better} better, {self.worse} worse"
        )


def answers(run: Run, version: int | Literal["first", "last"] = "last") -> pd.DataFrame:
    """One evaluation, by policy version or place; a row for each question: its text, completion
    (the first), score (mean over completions of the math answer, or of the reward without one).

    Raises ConfigError when there is no such evaluation.
    """
    versions = [e.policy_version for e in run.evaluations()]
    if not versions:
        raise ConfigError(f"{run.dir.path} has no evaluation")
    places = {"first": versions[0], "last": versions[-1]}
    wanted = places[version] if isinstance(version, str) else version
    if wanted not in versions:
        found = ", ".join(map(str, versions))
        raise ConfigError(f"there is no evaluation of version {version}; evaluated were {found}")
    mask = run.group_mask(purpose="eval", steps=(wanted, wanted))
    rows = run.rollouts(text=True, purpose="eval", steps=(wanted, wanted))
    prompts = run.table("rollouts", ["prompt"], mask)["prompt"]
    rows["score"] = rows[_GRADE] if _GRADE in rows else rows["reward"]
    rows["question"] = [
        question(run, columns, prompt)
        for columns, prompt in zip(run.prompt_columns(prompts), rows["prompt"], strict=True)
    ]
    wanted_columns = {"question": "first", "completion": "first", "score": "mean"}
    return rows.groupby("prompt_id", sort=False).agg(wanted_columns)


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
