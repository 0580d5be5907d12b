"""The frozen policy that the KL term compares with."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from llamarl_hpc.config.blocks.base import Block


class ReferenceConfig(Block):
    """The frozen reference of the KL term; made only if `algorithm.beta` is above 0."""

    path: str | None = Field(
        None, description="Its model, as `model.path`, same tokenizer. Default: the run's model."
    )
    placement: Literal["trainer", "executor"] = Field(
        "trainer",
        description="`trainer`: a copy on every trainer rank, used just before each step. "
        "`executor`: a job step of its own (`resources.reference`) that works beside training.",
    )
    offload: bool = Field(
        True,
        description="With placement `trainer` on GPUs: keep the copy in main memory and bring it "
        "to the device only while it computes.",
    )
    micro_batch_tokens: PositiveInt | None = Field(
        None,
        description="Tokens in one forward pass. Default: that of the trainer.",
    )
    update_steps: NonNegativeInt = Field(
        0,
        description="After every so many steps the reference becomes the policy as it then is; "
        "0: it stays what it was.",
    )
