"""Scored groups wait here until their optimizer step's batch is complete.

Pure bookkeeping: no clocks, no messages. The buffer never holds more than (S + 1) P groups,
because admission (`batching/staleness.py`) does not let more start.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from llamarl_hpc.batching.credit import Credit, CreditRules, assign_credit, divergence
from llamarl_hpc.types import Array, Completion, FinishReason, Prompt, TrainBatch


class ScoredGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt group with everything the trainer and the rollout store need. R completions."""

    ticket: int
    issue: int  # how often the ticket was handed to a replica, from 1
    prompt: Prompt
    generator: str
    completions: list[Completion]  # [R]
    rewards: dict[str, list[float | None]]  # component -> [R]
    reward: list[float]  # [R]
    error: str  # why scoring failed, or which limits completions hit; else empty
    failed: bool = False  # scoring raised an exception: the rewards mean nothing
    t_issued: float
    t_generated: float  # controller's clock when the completions arrived
    t_scored: float
    logprobs_reference: list[Array] = []  # float32 [T] each, once the reference has seen them

    @property
    def version_min(self) -> int:
        return min(c.version_min for c in self.completions)

    @property
    def num_tokens(self) -> int:
        """Completion tokens of the group."""
        return sum(len(c.token_ids) for c in self.completions)


class RolloutBuffer:
    """Groups by ticket; `take(step)` removes and returns the P groups of one step."""

    def __init__(self, *, prompts_per_step: int) -> None:
        self._prompts_per_step = prompts_per_step
        self._groups: dict[int, ScoredGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, group: ScoredGroup) -> None:
        assert group.ticket not in self._groups, f"ticket {group.ticket} was scored twice"
        self._groups[group.ticket] = group

    def _tickets(self, step: int) -> range:
        return range(step * self._prompts_per_step, (step + 1) * self._prompts_per_step)

    def missing(self, step: int) -> list[int]:
        """Tickets of this step's batch that are not here yet."""
        return [ticket for ticket in self._tickets(step) if ticket not in self._groups]

    def take(self, step: int) -> list[ScoredGroup]:
        """The batch of `step` in ticket order; it must be complete."""
        assert not self.missing(step)
        return [self._groups.pop(ticket) for ticket in self._tickets(step)]

    def drain(self) -> list[ScoredGroup]:
        """Everything that is left, in ticket order; the buffer is empty afterwards."""
        left = [self._groups[ticket] for ticket in sorted(self._groups)]
        self._groups.clear()
        return left


def credit_of(groups: Sequence[ScoredGroup], rules: CreditRules) -> Credit:
    """Credit of the completions of `groups`, in their order."""
    return assign_credit(
        [group.reward for group in groups],
        [[len(c.token_ids) for c in group.completions] for group in groups],
        [[c.finish_reason is FinishReason.LENGTH for c in g.completions] for g in groups],
        rules,
        _divergences(groups, rules) if rules.beta > 0.0 else None,
    )


def _divergences(groups: Sequence[ScoredGroup], rules: CreditRules) -> list[list[float]]:
    return [
        [
            divergence(np.asarray(c.logprobs), reference, rules.kl_estimator)
            for c, reference in zip(group.completions, group.logprobs_reference, strict=True)
        ]
        for group in groups
    ]


def make_train_batch(
    groups: Sequence[ScoredGroup],
    *,
    step: int,
    temperature: float,
    rules: CreditRules,
    trainer_version: int | None = None,
) -> TrainBatch:
    """Flatten groups into the trainer's arrays; rollouts in ticket order, then group order. With
    `trainer_version`, the trainer's policy version, the batch says how old each token is."""
    completions = [c for group in groups for c in group.completions]
    lengths = np.array([len(c.token_ids) for c in completions], dtype=np.int32)
    credit = credit_of(groups, rules)
    sizes = [len(group.completions) for group in groups]
    return TrainBatch(
        step=step,
        temperature=temperature,
        prompt_ids=np.concatenate([np.asarray(g.prompt.token_ids, np.int32) for g in groups]),
        prompt_lengths=np.array([len(g.prompt.token_ids) for g in groups], dtype=np.int32),
        group_index=np.repeat(np.arange(len(groups), dtype=np.int32), sizes),
        completion_ids=np.concatenate([np.asarray(c.token_ids, np.int32) for c in completions]),
        completion_lengths=lengths,
        logprobs=np.concatenate([np.asarray(c.logprobs, np.float32) for c in completions]),
        loss_mask=np.repeat(credit.trained, lengths),
        advantages=credit.advantages.astype(np.float32),
        logprobs_reference=_reference_of(groups) if rules.beta == 0.0 else None,
        lags=None if trainer_version is None else _lags(completions, trainer_version),
    )


def _reference_of(groups: Sequence[ScoredGroup]) -> Array | None:
    """float32 [N] for the loss; None without a reference."""
    logprobs = [array for group in groups for array in group.logprobs_reference]
    return np.concatenate(logprobs, dtype=np.float32) if logprobs else None


def _lags(completions: Sequence[Completion], version: int) -> Array:
    spans = [span for completion in completions for span in completion.versions]
    lags = np.array([version - span.version for span in spans], dtype=np.int32)
    return np.repeat(lags, [span.end - span.start for span in spans])


def split_by_rollout(flat: np.ndarray, batch: TrainBatch) -> list[np.ndarray]:
    """Cut a flat [N] array into one array per rollout, in the batch's order."""
    return np.split(flat, np.cumsum(batch.completion_lengths)[:-1])
