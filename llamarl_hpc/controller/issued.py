"""A prompt group on its way, and what is asked of others for it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from llamarl_hpc.channels.messages import ScoreItem
from llamarl_hpc.config.schema import Config
from llamarl_hpc.storage.records import GroupRecord
from llamarl_hpc.types import (
    GenerationRequest,
    GroupCompletions,
    Prompt,
    Purpose,
    SamplingParams,
    Status,
)

Key = tuple[Purpose, int]


@dataclass(kw_only=True)
class Issued:
    """A group at a replica, or with the reward executor."""

    prompt: Prompt
    request: GenerationRequest
    replica: str
    issue: int  # how often it has been handed out, from 1
    t_issued: float = field(default_factory=time.time)  # Unix time
    t_generated: float = 0.0
    done: GroupCompletions | None = None  # once generated
    asked_at: float = field(default_factory=time.monotonic)  # of whoever has it now

    @property
    def key(self) -> Key:
        return self.request.purpose, self.request.group_id

    @property
    def is_for_training(self) -> bool:
        return self.request.purpose is Purpose.TRAIN

    def score_item(self) -> ScoreItem:
        """Once it is generated."""
        assert self.done is not None
        return ScoreItem(
            purpose=self.request.purpose,
            group_id=self.request.group_id,
            prompt=self.prompt.text,
            columns=dict(self.prompt.columns),
            completions=[c.text for c in self.done.completions],
        )

    def abandoned(self, reason: str, *, attempt: int) -> GroupRecord:
        """What the store keeps of it when nothing will come of it."""
        return GroupRecord(
            purpose=self.request.purpose,
            group_id=self.request.group_id,
            attempt=attempt,
            issue=self.issue,
            prompt=self.prompt,
            status=Status.ABANDONED,
            reason=reason,
            step=-1,
            generator=self.replica,
            temperature=self.request.sampling.temperature,
            t_issued=self.t_issued,
            t_resolved=time.time(),
        )


def training_request(config: Config, ticket: int, prompt: Prompt) -> GenerationRequest:
    rollout = config.rollout
    return GenerationRequest(
        purpose=Purpose.TRAIN,
        group_id=ticket,
        prompt_ids=prompt.token_ids,
        num_generations=rollout.num_generations,
        sampling=SamplingParams(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            max_tokens=rollout.max_completion_length,
            seed=rollout.seed,
        ),
    )


def evaluation_request(config: Config, number: int, prompt: Prompt) -> GenerationRequest:
    evaluation = config.evaluation
    return GenerationRequest(
        purpose=Purpose.EVAL,
        group_id=number,
        prompt_ids=prompt.token_ids,
        num_generations=evaluation.num_generations,
        sampling=SamplingParams(
            temperature=evaluation.temperature,
            max_tokens=config.rollout.max_completion_length,
            seed=evaluation.seed,
        ),
    )
