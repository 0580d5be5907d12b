"""From a scored group to the row that the rollout store keeps of it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from llamarl_hpc.batching.buffer import ScoredGroup
from llamarl_hpc.storage.records import GroupRecord
from llamarl_hpc.types import Array, Purpose, Status


def record_of(
    group: ScoredGroup,
    *,
    purpose: Purpose,
    status: Status,
    attempt: int,
    temperature: float,
    reason: str = "",
    step: int = -1,
    staleness: int = -1,
    advantage: Sequence[float] | None = None,
    logprobs_trainer: Sequence[Array] = (),
    loss_mask: Sequence[Array] = (),
    entropy: Sequence[Array] = (),
) -> GroupRecord:
    """The arguments from `advantage` on are only for groups that were trained."""
    return GroupRecord(
        purpose=purpose,
        group_id=group.ticket,
        attempt=attempt,
        issue=group.issue,
        prompt=group.prompt,
        status=status,
        reason=reason or group.error,
        step=step,
        generator=group.generator,
        temperature=temperature,
        staleness=staleness,
        completions=group.completions,
        rewards=group.rewards,
        reward=group.reward,
        advantage=list(advantage) if advantage is not None else [0.0] * len(group.completions),
        logprobs_trainer=list(logprobs_trainer),
        loss_mask=list(loss_mask),
        entropy=list(entropy),
        logprobs_reference=group.logprobs_reference,
        t_issued=group.t_issued,
        t_resolved=time.time(),
    )
