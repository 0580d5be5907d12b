"""What texts of a run are paid for: phrases, and answers that serve for many questions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.read_run import Run
from analysis.text_statistics import (
    most_paid_phrases,
    near_duplicates,
    share_with,
    words,
)
from analysis.windows import Texts

MAX_IDS = 5  # rollouts that stand for many
_LEAST_Z = 2.0  # of a phrase that is worth a line


@dataclass(frozen=True, kw_only=True, slots=True)
class PaidPhrase:
    """A phrase that pays; shares are of texts from all over the run, unless named otherwise."""

    text: str
    share_paid: float
    share_unpaid: float
    share_early: float  # of the texts of the first quarter
    share_late: float  # of the last
    z: float
    rollout_ids: list[int]


def duplicated(sample: Texts, *, questions: int = 3) -> list[int]:
    """Indices of texts that answer `questions` differing questions, or more, alike.

    Questions differ when their reference answers do; without such, when the prompts do, and then
    only texts of five words or more count.
    """
    found: list[int] = []
    for members in near_duplicates(sample.texts):
        known = all(sample.answers[i] is not None for i in members)
        if known:  # a right answer is another text, or another number, for each of these
            asked = {sample.answers[i] for i in members}
        elif len(words(sample.texts[members[0]])) >= 5:
            asked = {sample.prompt_ids[i] for i in members}
        else:
            continue
        if len(asked) >= questions:
            found += members
    return found


def paid_phrases(everything: Texts, early: Texts, late: Texts) -> list[PaidPhrase]:
    """The phrases that the reward favours within groups, and how they spread.

    They are looked for all over the run: once every completion has one, it pays no more.
    """
    known, paid = everything.paid()
    found = most_paid_phrases([everything.texts[i] for i in known], paid)
    return [
        PaidPhrase(
            text=phrase.text,
            share_paid=phrase.share_paid,
            share_unpaid=phrase.share_unpaid,
            share_early=share_with(phrase.text, early.texts),
            share_late=share_with(phrase.text, late.texts),
            z=phrase.z,
            rollout_ids=[everything.rollout_ids[known[i]] for i in phrase.examples],
        )
        for phrase in found
        if phrase.z >= _LEAST_Z
    ]


def lost_questions(run: Run, best_version: int) -> list[int]:
    """Ids of held-out completions of the last evaluation that are wrong, though the same question
    was answered right at its best version."""
    mask = run.group_mask(purpose="eval")
    rows = run.table("rollouts", ["rollout_id", "step", "prompt", "reward"], mask)
    if not len(rows["step"]):
        return []
    names = np.array(run.decoded("prompt", rows["prompt"]))
    right = rows["reward"] > 0.5
    best = set(names[(rows["step"] == best_version) & right].tolist())
    last = (rows["step"] == rows["step"].max()) & ~right
    wrong = zip(rows["rollout_id"][last].tolist(), names[last].tolist(), strict=True)
    return [rollout for rollout, name in wrong if name in best][:MAX_IDS]
