"""A question with its data row, before it is rendered: what files and generated tasks both give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TASK = "task"  # column with the name of a generated task
METADATA = "metadata"  # column with what reasoning-gym says about a generated question


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One question. Rows with equal `question` are one question, whatever the rest says."""

    question: str
    columns: dict[str, Any]  # the whole data row; reward functions get it as keyword arguments
    where: str  # for messages: "train.jsonl line 12", "task chain_sum"


def question_column(prompt: str | list[str]) -> str:
    """The name under which a generated question is put into its row."""
    return prompt if isinstance(prompt, str) else "question"
