"""Scored groups wait here until their optimizer step's batch is complete.

Pure bookkeeping: no clocks, no messages. The buffer never holds more than (S + 1) P groups,
because admission (`batching/staleness.py`) does not let more start. What dynamic sampling drops
makes room for as many new ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

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
    """Groups until the batch of their step is complete; batches are cut in ticket order.

    Step k gets the next P tickets. With resampling a group without spread is dropped and the next
    ticket takes its place, at most `max_resamples` times in a step. A group's fate is decided when
    all tickets before it are here, so batches do not depend on who was quicker.
    """

    def __init__(
        self,
        *,
        prompts_per_step: int,
        first_step: int = 0,
        first_ticket: int = 0,
        max_resamples: int = 0,
        is_constant: Callable[[ScoredGroup], bool] = lambda group: False,
    ) -> None:
        """`first_ticket` is the first that the steps before `first_step` did not use."""
        self._prompts_per_step, self._max_resamples = prompts_per_step, max_resamples
        self._is_constant = is_constant
        self._step, self._next_ticket = first_step, first_ticket
        self._early: dict[int, ScoredGroup] = {}  # some ticket before them is not here yet
        self._accepted: list[ScoredGroup] = []  # of step `_step` and later ones, in order
        self._replaced: Counter[int] = Counter()  # groups that a step dropped

    def __len__(self) -> int:
        return len(self._early) + len(self._accepted)

    def put(self, group: ScoredGroup) -> list[ScoredGroup]:
        """A scored group. Returns the groups that are dropped now."""
        assert group.ticket >= self._next_ticket and group.ticket not in self._early, (
            f"ticket {group.ticket} was scored twice"
        )
        self._early[group.ticket] = group
        dropped = []
        while (decided := self._early.pop(self._next_ticket, None)) is not None:
            self._next_ticket += 1
            step = self._step + len(self._accepted) // self._prompts_per_step
            if self._replaced[step] < self._max_resamples and self._is_constant(decided):
                self._replaced[step] += 1
                dropped.append(decided)
            else:
                self._accepted.append(decided)
        return dropped

    def missing(self, step: int) -> list[int]:
        """Tickets that the batches up to this step wait for, if no more are dropped."""
        wanted = (step - self._step + 1) * self._prompts_per_step - len(self._accepted)
        tickets = range(self._next_ticket, self._next_ticket + max(0, wanted))
        return [ticket for ticket in tickets if ticket not in self._early]

    def take(self, step: int) -> list[ScoredGroup]:
        """The batch of `step`, the next one, in ticket order; it must be complete."""
        assert step == self._step and not self.missing(step)
        batch = self._accepted[: self._prompts_per_step]
        del self._accepted[: self._prompts_per_step]
        self._step += 1
        return batch

    def replaced(self, step: int) -> int:
        """Groups that were dropped for this step, which has been taken."""
        return self._replaced.pop(step, 0)

    def tickets(self) -> list[int]:
        """Of everything that is here."""
        return [*self._early, *(group.ticket for group in self._accepted)]

    def drain(self) -> list[ScoredGroup]:
        """Everything that is left, in ticket order; the buffer is empty afterwards."""
        left = [*self._accepted, *(self._early[ticket] for ticket in sorted(self._early))]
        self._accepted, self._early = [], {}
        return left


def credit_of(groups: Sequence[ScoredGroup], rules: CreditRules) -> Credit:
    """Credit of the completions of `groups`, in their order."""
    return assign_credit(
        [group.reward for group in groups],
        [[len(c.token_ids) for c in group.completions] for group in groups],
        [[c.finish_reason is FinishReason.LENGTH for c in g.completions] for g in groups],
        rules,
        _divergences(groups, rules) if rules.beta > 0.0 else None,
        failed=[group.failed for group in groups],
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
