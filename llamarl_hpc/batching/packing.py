"""From a ragged TrainBatch to the padded micro-batches that each trainer rank computes.

Two forms of a row:

    plain           [prompt, completion]                one row per rollout, causal attention
    shared prompt   [prompt, c1, c2, ...]               one row per group (or part of one); every
                     0 ..P  P.. P..   position ids       completion sees the prompt and itself

A completion's last token is a target only: nothing is predicted from it, so no row holds it.

Whole groups go to ranks, balanced by tokens. All ranks get the same number of micro-batches:
ZeRO's collectives need equal numbers of forward and backward passes, so a rank with less work
gets dummies of weight 0.

Letters: B rows, L padded row length, K completion tokens of a micro-batch, N of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llamarl_hpc.config.losses import Aggregation
from llamarl_hpc.types import Array, TrainBatch

PROMPT_SEGMENT = 0  # completions of a row are segments 1, 2, ...
PADDING_SEGMENT = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Input and targets of one forward and backward pass."""

    token_ids: Array  # int64 [B, L]
    position_ids: Array  # int64 [B, L]; restart after the prompt for each completion
    segment_ids: Array  # int64 [B, L]; 0 prompt, 1.. completions, -1 padding
    gather_index: Array  # int64 [K], into the flattened [B * L]: where token k is predicted
    target_ids: Array  # int64 [K]
    logprobs: Array  # float32 [K], behaviour policy
    advantages: Array  # float32 [K], of the token's rollout
    weights: Array  # float64 [K], share of the token in the batch's loss; 0 where not trained
    rollout_index: Array  # int64 [K], number of the token's rollout, from 0; each is here whole
    flat_index: Array  # int64 [K], where token k lies in the batch's N; empty for a dummy
    num_tokens: int  # in the rows, without padding; 0 for a dummy
    logprobs_reference: Array | None = None  # float32 [K], if the batch has them
    lags: Array | None = None  # int32 [K], likewise

    @property
    def has_shared_prompt(self) -> bool:
        """Whether plain causal attention would let a completion see another one."""
        return bool(self.segment_ids.max() > 1)


def token_weights(
    batch: TrainBatch, *, aggregation: Aggregation, max_completion_length: int
) -> Array:
    """Weight float64 [N] of every token in the loss of the whole batch; 0 where not trained.

    The denominators are those of the global batch, so a loss that is the weighted sum over tokens
    is independent of micro-batches and ranks. Tokens, and rollouts without any trained token,
    count neither above nor below the line. With nothing to train all weights are 0.
    """
    mask: Array = batch.loss_mask.astype(np.float64)
    rollout: Array = np.repeat(np.arange(len(batch.completion_lengths)), batch.completion_lengths)
    tokens_R = np.bincount(rollout, weights=mask, minlength=len(batch.completion_lengths))
    num_rollouts = np.count_nonzero(tokens_R)
    if num_rollouts == 0:
        return mask
    if aggregation == "token-mean":
        mask /= mask.sum()
    elif aggregation == "seq-mean-token-mean":
        mask /= np.maximum(tokens_R, 1.0)[rollout] * num_rollouts
    else:
        mask /= float(max_completion_length) * num_rollouts
    return mask


def rollouts_with_gradient(batch: TrainBatch, weights: Array, *, entropy_bonus: bool) -> Array:
    """bool [R]: rollouts that can move a parameter.

    One whose advantage is exactly 0 (its group was constant) or whose tokens are all masked has
    gradient 0, whatever its log-probs are: leaving it out changes nothing but the time. An entropy
    bonus pulls at every trained token, whatever its advantage.
    """
    ends = np.cumsum(batch.completion_lengths, dtype=np.int64)
    trained = np.add.reduceat(np.abs(weights), ends - batch.completion_lengths) > 0.0
    return np.asarray(trained if entropy_bonus else trained & (batch.advantages != 0.0))


def micro_batches_of_rank(
    batch: TrainBatch,
    weights: Array,
    *,
    needed: Array | None = None,
    rank: int,
    num_ranks: int,
    micro_batch_tokens: int,
    share_prompt: bool,
) -> list[MicroBatch]:
    """The micro-batches of `rank`: as many as on every other rank, each completion token once.

    With `needed` (bool [R]) the other rollouts are left out; then a rank may have only dummies.
    A micro-batch has at most `micro_batch_tokens` tokens, padding counted; a row that is longer
    than that is alone in its own.
    """
    layout = _Layout(batch, needed)
    groups_of_rank = layout.assign_groups(num_ranks, share_prompt)
    plans = [
        _fill(layout.rows(groups, share_prompt, micro_batch_tokens), micro_batch_tokens)
        for groups in groups_of_rank
    ]
    num_micro_batches = max(1, *(len(plan) for plan in plans))
    mine = [layout.build(rows, weights) for rows in plans[rank]]
    return mine + [_dummy(batch)] * (num_micro_batches - len(mine))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    group: int
    rollouts: tuple[int, ...]
    length: int


class _Layout:
    """Where prompts and completions lie in the flat arrays of a batch."""

    def __init__(self, batch: TrainBatch, needed: Array | None) -> None:
        self.batch = batch
        self.prompt_lengths = batch.prompt_lengths.astype(np.int64)
        self.lengths = batch.completion_lengths.astype(np.int64)
        self.prompt_starts = np.cumsum(self.prompt_lengths) - self.prompt_lengths
        self.inputs = self.lengths - 1  # tokens of a completion that are in its row
        self.starts = np.cumsum(self.lengths) - self.lengths
        assert self.prompt_lengths.min() >= 1, "the first token is predicted from the prompt's last"
        assert int(self.lengths.sum()) == len(batch.completion_ids) == len(batch.logprobs)
        self.members: list[list[int]] = [[] for _ in self.prompt_lengths]
        for rollout, group in enumerate(batch.group_index.tolist()):
            if needed is None or needed[rollout]:
                self.members[group].append(rollout)

    def assign_groups(self, num_ranks: int, share_prompt: bool) -> list[list[int]]:
        """Groups of each rank: the longest first, each to the rank with the fewest tokens."""
        costs = [
            int(self.inputs[rollouts].sum())
            + int(self.prompt_lengths[group]) * (1 if share_prompt else len(rollouts))
            for group, rollouts in enumerate(self.members)
        ]
        loads = [0] * num_ranks
        groups_of_rank: list[list[int]] = [[] for _ in range(num_ranks)]
        for group in sorted(range(len(costs)), key=lambda g: (-costs[g], g)):
            if self.members[group]:
                rank = loads.index(min(loads))
                loads[rank] += costs[group]
                groups_of_rank[rank].append(group)
        return [sorted(groups) for groups in groups_of_rank]

    def rows(self, groups: Sequence[int], share_prompt: bool, max_length: int) -> list[_Row]:
        rows: list[_Row] = []
        for group in groups:
            chosen: list[int] = []
            length = prompt_length = int(self.prompt_lengths[group])
            for rollout in self.members[group]:
                added = int(self.inputs[rollout])
                if chosen and (not share_prompt or length + added > max_length):
                    rows.append(_Row(group=group, rollouts=tuple(chosen), length=length))
                    chosen, length = [], prompt_length
                chosen.append(rollout)
                length += added
            rows.append(_Row(group=group, rollouts=tuple(chosen), length=length))
        return rows

    def build(self, rows: Sequence[_Row], weights: Array) -> MicroBatch:
        """Lay the rows out, padded on the right to the longest."""
        batch, width = self.batch, max(row.length for row in rows)
        token_ids = np.zeros((len(rows), width), dtype=np.int64)
        position_ids = np.tile(np.arange(width, dtype=np.int64), (len(rows), 1))
        segment_ids = np.full((len(rows), width), PADDING_SEGMENT, dtype=np.int64)
        gather: list[Array] = []
        order: list[Array] = []
        for b, row in enumerate(rows):
            prompt_length = int(self.prompt_lengths[row.group])
            source = int(self.prompt_starts[row.group])
            token_ids[b, :prompt_length] = batch.prompt_ids[source : source + prompt_length]
            segment_ids[b, :prompt_length] = PROMPT_SEGMENT
            at = prompt_length
            for segment, rollout in enumerate(row.rollouts, start=1):
                source, inputs = int(self.starts[rollout]), int(self.inputs[rollout])
                token_ids[b, at : at + inputs] = batch.completion_ids[source : source + inputs]
                position_ids[b, at : at + inputs] = prompt_length + np.arange(inputs)
                segment_ids[b, at : at + inputs] = segment
                # Token t is predicted where token t-1 stands; the first one by the prompt's last.
                predictors = at - 1 + np.arange(inputs + 1)
                predictors[0] = prompt_length - 1
                gather.append(b * width + predictors)
                order.append(source + np.arange(inputs + 1))
                at += inputs
        flat_index = np.concatenate(order)
        rollout_lengths = [len(tokens) for tokens in order]
        advantages = np.repeat(batch.advantages, self.lengths)
        return MicroBatch(
            token_ids=token_ids,
            position_ids=position_ids,
            segment_ids=segment_ids,
            gather_index=np.concatenate(gather),
            target_ids=batch.completion_ids[flat_index].astype(np.int64),
            logprobs=batch.logprobs[flat_index],
            advantages=advantages[flat_index],
            weights=weights[flat_index],
            rollout_index=np.repeat(np.arange(len(order), dtype=np.int64), rollout_lengths),
            flat_index=flat_index,
            num_tokens=sum(row.length for row in rows),
            logprobs_reference=_some(batch.logprobs_reference, flat_index),
            lags=_some(batch.lags, flat_index),
        )


def _fill(rows: Sequence[_Row], micro_batch_tokens: int) -> list[list[_Row]]:
    """Rows of similar length together, the longest first, within the budget."""
    bins: list[list[_Row]] = []
    for row in sorted(rows, key=lambda r: (-r.length, r.group, r.rollouts)):
        if bins and (len(bins[-1]) + 1) * bins[-1][0].length <= micro_batch_tokens:
            bins[-1].append(row)
        else:
            bins.append([row])
    return bins


def _some(values: Array | None, index: Array) -> Array | None:
    return None if values is None else values[index]


def _dummy(batch: TrainBatch) -> MicroBatch:
    """One token that reaches every parameter with gradient 0."""
    zero = np.zeros((1, 1), dtype=np.int64)
    return MicroBatch(
        token_ids=zero,
        position_ids=zero,
        segment_ids=zero,
        gather_index=zero[0],
        target_ids=zero[0],
        logprobs=np.zeros(1, dtype=np.float32),
        advantages=np.zeros(1, dtype=np.float32),
        weights=np.zeros(1, dtype=np.float64),
        rollout_index=zero[0],
        flat_index=np.zeros(0, dtype=np.int64),
        num_tokens=0,
        logprobs_reference=_some(batch.logprobs_reference, zero[0]),
        lags=_some(batch.lags, zero[0]),
    )
