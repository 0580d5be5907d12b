"""Rollouts to look at in the report: the best and worst of late groups, and of evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from analysis.hacking import Flag
from analysis.read_run import Run
from analysis.rollout_view import question
from analysis.stored_rollout import StoredRollout
from analysis.tokens import coloured_pieces, load_tokenizer
from llamarl_hpc.types import Array

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MAX_TEXT = 1500  # characters of a prompt or completion


@dataclass(frozen=True, kw_only=True)
class Card:
    """One rollout to look at."""

    rollout_id: int  # what a link jumps to
    heading: str
    question: str
    pieces: list[tuple[str, int]]  # text, ratio level -3..3
    facts: list[str]
    tone: str  # good, bad or plain


def cards(run: Run, flags: Sequence[Flag] = ()) -> list[Card]:
    """A dozen of the run, then those that flags point to. Each rollout once."""
    tokenizer = load_tokenizer(run)
    reasons: dict[int, list[str]] = {}
    for heading, row in [*_chosen(run), *_flagged(run, flags)]:
        reasons.setdefault(row, []).append(heading)
    return [_card(run, tokenizer, row, "; ".join(dict.fromkeys(r))) for row, r in reasons.items()]


def _flagged(run: Run, flags: Sequence[Flag]) -> list[tuple[str, int]]:
    return [
        (f"flagged: {flag.kind}", run.store.find_rollout(number))
        for flag in flags
        for number in flag.rollout_ids
    ]


def _card(run: Run, tokenizer: Tokenizer | None, row: int, heading: str) -> Card:
    rollout = run.rollout_at(row)
    return Card(
        rollout_id=rollout.rollout_id,
        heading=heading,
        question=question(run, rollout.columns, rollout.prompt)[:_MAX_TEXT],
        pieces=_cut(coloured_pieces(tokenizer, rollout), _MAX_TEXT),
        facts=_facts(rollout),
        tone="good" if rollout.reward > 0.5 else "bad",
    )


def _chosen(run: Run) -> list[tuple[str, int]]:
    """(why it is shown, row): a dozen, from different groups."""
    current = run.group_mask()
    of_group = run.store.column("rollouts/group")
    columns = run.store.columns("rollouts", ["step", "reward", "advantage", "purpose", "status"])
    rows = np.flatnonzero(current[of_group])
    trained = rows[columns["status"][rows] == 0]
    chosen: list[tuple[str, int]] = []
    if len(trained):
        steps = columns["step"][trained]
        late = trained[steps >= np.quantile(steps, 0.75)]
        advantage = columns["advantage"][late]
        best = _distinct(late[np.argsort(-advantage, kind="stable")], of_group, 3)
        worst = _distinct(late[np.argsort(advantage, kind="stable")], of_group, 3)
        chosen += [("best of its group", row) for row in best]
        chosen += [("worst of its group", row) for row in worst]
    tested = rows[columns["purpose"][rows] == 1]
    if len(tested):
        versions = columns["step"][tested]
        graded = "math_answer" in run.reward_names
        scores = run.store.column("rewards/math_answer") if graded else columns["reward"]
        for version, name in ((versions.max(), "last"), (versions.min(), "first")):
            at = tested[versions == version]
            right = scores[at] > 0.5
            for mask, word, count in ((right, "right", 2), (~right, "wrong", 1)):
                heading = f"{name} evaluation, {word}"
                chosen += [(heading, row) for row in _distinct(at[mask], of_group, count)]
            if versions.max() == versions.min():
                break
    return chosen


def _distinct(rows: Array, groups: Array, count: int) -> list[int]:
    found: dict[int, int] = {}
    for row in rows.tolist():
        found.setdefault(int(groups[row]), row)
        if len(found) == count:
            break
    return list(found.values())


def _facts(rollout: StoredRollout) -> list[str]:
    facts = [f"reward {rollout.reward:.2f}"]
    if rollout.status == "trained":
        facts += [f"advantage {rollout.advantage:+.2f}", f"staleness {rollout.staleness}"]
    answer = rollout.columns.get("answer")
    if isinstance(answer, str | int | float):
        facts.append(f"answer {str(answer).rpartition('####')[2].strip()[:40]}")
    at = "version" if rollout.purpose == "eval" else "step"
    facts.append(f"{at} {rollout.step}")
    facts.append(f"{len(rollout.token_ids)} tokens, {rollout.finish_reason}")
    facts.append(f"rollout {rollout.rollout_id}")
    return facts


def _cut(pieces: list[tuple[str, int]], limit: int) -> list[tuple[str, int]]:
    kept: list[tuple[str, int]] = []
    length = 0
    for text, level in pieces:
        if length + len(text) > limit:
            return [*kept, (" ...", 0)]
        kept.append((text, level))
        length += len(text)
    return kept
