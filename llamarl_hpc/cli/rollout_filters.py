"""Options of the `rollouts` commands that say which completions are meant."""

from __future__ import annotations

import math
from typing import Annotated

import typer

StatusOption = Annotated[
    str | None, typer.Option("--status", help="trained, dropped, abandoned or evaluation.")
]
PurposeOption = Annotated[str | None, typer.Option("--purpose", help="train or eval.")]
PromptOption = Annotated[
    str | None, typer.Option("--prompt", help="Only of the question with this id, or its begin.")
]
MinRewardOption = Annotated[
    float | None, typer.Option("--min-reward", help="Only with this reward or more.")
]
MaxRewardOption = Annotated[
    float | None, typer.Option("--max-reward", help="Only with this reward or less.")
]
AllOption = Annotated[bool, typer.Option("--all", help="Also what a resume has thrown away.")]


def reward_range(least: float | None, most: float | None) -> tuple[float, float] | None:
    """For `Run.rollout_mask`. None when neither is given, for it leaves unscored ones out."""
    if least is None and most is None:
        return None
    return (-math.inf if least is None else least, math.inf if most is None else most)
