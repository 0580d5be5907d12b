"""What a reward is: a function in TRL's form with a name and a weight.

    f(prompts, completions, **columns) -> one float, or None where it does not apply, per completion

`prompts` and `completions` are texts; each data column comes as a list of the same length. Light
to import: pool workers are started often and load no more than they use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from llamarl_hpc.rewards.math_answer import MathAnswer, warm_up
from llamarl_hpc.rewards.python_function import PythonFunction

if TYPE_CHECKING:
    from llamarl_hpc.config.schema import MathAnswerReward, PythonReward


class RewardFunction(Protocol):
    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[Any]
    ) -> list[float | None]:
        """One score per completion; None where the reward does not apply."""


class RewardSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A reward of the config, in the form that travels to a worker."""

    kind: str
    name: str
    weight: float
    function: str = ""  # of kind "python"

    @property
    def one_by_one(self) -> bool:
        """Each completion is scored in a call of its own, with a time limit of its own."""
        return self.kind != "python"


class NamedReward(msgspec.Struct, frozen=True, kw_only=True):
    """A reward ready to be called."""

    name: str
    weight: float
    function: RewardFunction


def specs(configs: Iterable[MathAnswerReward | PythonReward]) -> list[RewardSpec]:
    """The config's rewards with their names filled in."""
    return [
        RewardSpec(
            kind=config.kind,
            name=config.name or getattr(config, "function", "").rpartition(":")[2],
            weight=config.weight,
            function=getattr(config, "function", ""),
        )
        for config in configs
    ]


def build_rewards(
    configs: Iterable[MathAnswerReward | PythonReward], answer: str = "answer"
) -> list[NamedReward]:
    """The rewards of a config, callable here; `answer` is the column with the reference.

    Raises ConfigError for a function that cannot be found or imported.
    """
    return [build(spec, answer) for spec in specs(configs)]


def build(spec: RewardSpec, answer: str) -> NamedReward:
    function: RewardFunction
    if spec.kind == "math_answer":
        warm_up()
        function = MathAnswer(answer)
    else:
        assert spec.kind == "python", spec.kind
        function = PythonFunction(spec.function)
    return NamedReward(name=spec.name, weight=spec.weight, function=function)


def call(
    reward: NamedReward, prompt: str, completions: Sequence[str], columns: dict[str, Any]
) -> list[float | None]:
    """Scores of completions of one prompt. Raises ValueError when the function breaks its form."""
    number = len(completions)
    repeated = {name: [value] * number for name, value in columns.items()}
    repeated = {n: v for n, v in repeated.items() if n not in ("prompts", "completions")}
    return _checked(
        reward.function([prompt] * number, list(completions), **repeated), reward.name, number
    )


def total(weights: Sequence[float], components: Sequence[Sequence[float | None]]) -> list[float]:
    """The weighted sum per completion; None counts as 0. `components` is [reward][completion]."""
    return [
        sum(w * (value or 0.0) for w, value in zip(weights, values, strict=True))
        for values in zip(*components, strict=True)
    ]


def _checked(values: Any, name: str, number: int) -> list[float | None]:
    try:
        scores = [None if value is None else float(value) for value in values]
    except (TypeError, ValueError):
        raise ValueError(
            f"reward '{name}' returned {values!r:.100}, not a list of numbers"
        ) from None
    if len(scores) != number:
        raise ValueError(f"reward '{name}' returned {len(scores)} scores for {number} completions")
    if not all(score is None or math.isfinite(score) for score in scores):
        raise ValueError(f"reward '{name}' returned {scores}; wanted finite numbers")
    return scores
