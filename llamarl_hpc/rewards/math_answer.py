"""The reward for a right answer: 1.0 when it means what the reference means, else 0.0.

    completion -> extraction.py -> answer   \\
                                              equality.py -> 1.0 | 0.0
    data row   -> reference_answer          /

An arithmetic answer costs about 20 microseconds; computer algebra is used only for answers that
are not numbers. Runs in a pool worker, which bounds its time and memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from llamarl_hpc.rewards.equality import equal
from llamarl_hpc.rewards.extraction import extract_answer, last_box


class MathAnswer:
    """Reads the reference from the data column `answer`; None where the row has none."""

    def __init__(self, answer: str) -> None:
        self.answer = answer

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[Any]
    ) -> list[float | None]:
        references = columns.get(self.answer) or [None] * len(completions)
        return [
            None if reference is None else score(str(reference), completion)
            for completion, reference in zip(completions, references, strict=True)
        ]


def score(reference: str, completion: str) -> float:
    """1.0 or 0.0. `reference` is the raw column: an answer, or a solution that states one."""
    answer = extract_answer(completion)
    if answer is None:
        return 0.0
    try:
        return 1.0 if equal(reference_answer(reference), answer) else 0.0
    except MemoryError:
        raise
    except Exception:  # what computer algebra cannot digest (deep nesting, ...) is not right
        return 0.0


@lru_cache(maxsize=8192)
def reference_answer(text: str) -> str:
    """The part after `####` (GSM8K), the last box of a solution (MATH), else all of it."""
    if "####" in text or "boxed" in text:
        marked = extract_answer(text) if "####" in text else last_box(text)
        return marked or text.strip()
    return text.strip()


def warm_up() -> None:
    """Import computer algebra and its parser now, so that no completion's time limit pays."""
    equal(r"\\frac{x}{2}", r"\\frac{1}{2} x")
