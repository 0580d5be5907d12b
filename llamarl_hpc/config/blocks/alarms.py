"""What is watched in the metrics of every step."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from llamarl_hpc.config.blocks.base import Block

Action = Literal["off", "warn", "stop"]
_ACTION = "`warn`: a line in the log and in metrics.jsonl. `stop`: the run ends with exit code 3."
_STEPS = "Steps in a row of which this must be true."


class NoSignalAlarm(Block):
    """No group of a step had a spread in its rewards, so nothing could be learnt."""

    steps: PositiveInt = Field(10, description=_STEPS)
    action: Action = Field("warn", description=_ACTION)


class EssAlarm(Block):
    """`ess` fell below the limit: a few tokens carry all the weight."""

    limit: NonNegativeFloat = Field(0.05, description="Lower limit of `ess`.")
    steps: PositiveInt = Field(3, description=_STEPS)
    action: Action = Field("warn", description=_ACTION)


class MismatchKlAlarm(Block):
    """`mismatch/kl` rose above the limit: the trained policy is far from the one that drew."""

    limit: NonNegativeFloat = Field(0.5, description="Upper limit of `mismatch/kl`.")
    steps: PositiveInt = Field(3, description=_STEPS)
    action: Action = Field("warn", description=_ACTION)


class EntropyAlarm(Block):
    """`entropy` fell below the limit: the policy has nothing left to try."""

    limit: NonNegativeFloat = Field(0.01, description="Lower limit of `entropy`, nats.")
    steps: PositiveInt = Field(10, description=_STEPS)
    action: Action = Field("warn", description=_ACTION)


class RewardAlarm(Block):
    """The mean of `reward/mean` over the last steps fell this far below the best such mean."""

    limit: PositiveFloat = Field(0.5, description="How far it may fall.")
    steps: PositiveInt = Field(10, description="Steps that are averaged.")
    action: Action = Field("off", description=_ACTION)


class LengthAlarm(Block):
    """The mean of `completions/mean_length` over the last steps left the range around the first
    such mean."""

    limit: float = Field(3.0, gt=1.0, description="By which factor it may grow or shrink.")
    steps: PositiveInt = Field(10, description="Steps that are averaged.")
    action: Action = Field("off", description=_ACTION)


class AlarmsConfig(Block):
    """What is watched in the metrics of every step, and what happens then."""

    not_finite: Action = Field(
        "stop",
        description="Loss or gradient norm is not a number. Such a step is never applied. `stop` "
        "ends the run with a checkpoint; otherwise it goes on, until the third in a row.",
    )
    no_signal: NoSignalAlarm = Field(default_factory=lambda: NoSignalAlarm())
    ess: EssAlarm = Field(default_factory=lambda: EssAlarm())
    mismatch_kl: MismatchKlAlarm = Field(default_factory=lambda: MismatchKlAlarm())
    entropy: EntropyAlarm = Field(default_factory=lambda: EntropyAlarm())
    reward: RewardAlarm = Field(default_factory=lambda: RewardAlarm())
    length: LengthAlarm = Field(default_factory=lambda: LengthAlarm())
