"""How completions are scored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from llamarl_hpc.config.blocks.base import Block


class MathAnswerReward(Block):
    """1.0 when the completion's answer equals the reference (math-verify), else 0.0."""

    kind: Literal["math_answer"] = "math_answer"
    name: str = Field("math_answer", description="Name in metrics and in the rollout store.")
    weight: float = Field(1.0, description="Factor in the sum that is the reward.")


class PythonReward(Block):
    """A function of yours, in TRL's form: f(prompts, completions, **columns) -> scores."""

    kind: Literal["python"] = "python"
    function: str = Field(description="`module:function` or `path/to/file.py:function`.")
    name: str | None = Field(None, description="Default: the function's name.")
    weight: float = Field(1.0, description="Factor in the sum that is the reward.")


RewardConfig = Annotated[MathAnswerReward | PythonReward, Field(discriminator="kind")]


class RewardPoolConfig(Block):
    """The reward executor's pool of killable worker processes."""

    workers: PositiveInt = Field(1, description="Worker processes per rank.")
    timeout_s: PositiveFloat = Field(
        10.0, description="Time for one completion; after that its worker is killed, score 0."
    )
    memory_mb: PositiveInt = Field(2048, description="Address space of a worker above its start.")
