"""The vocabulary: what travels between stages and executors, each word with one meaning.

All types are frozen `msgspec.Struct`s, so the same object that a stage returns can go over a
channel unchanged (arrays travel as raw frames, see `channels/codec.py`).

Letters in names: G groups (prompts), R rollouts, T tokens of one completion, N = sum of T over R.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # the end-of-sequence token was sampled; it is the last token of the completion
    LENGTH = "length"  # max_tokens (or the model's context) was reached first
    ABORTED = "aborted"  # cut off by us; never trained


class Status(StrEnum):
    """What became of a prompt group. Every issued group ends in exactly one of these."""

    TRAINED = "trained"
    DROPPED = "dropped"  # finished, but not used: too stale, failed scoring, ...
    ABANDONED = "abandoned"  # never finished: its replica died, the run was stopped
    EVALUATION = "evaluation"  # generated to measure, never to train


class Purpose(StrEnum):
    """What a prompt group is generated for. Group ids are dense within a purpose."""

    TRAIN = "train"
    EVAL = "eval"


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One question, rendered and tokenised once, by the controller."""

    prompt_id: str  # hash of the rendered text and the answer columns; equal content, equal id
    epoch: int  # how often the data set had been gone through before; 0 at first
    text: str  # exactly what the model is shown, special tokens included
    token_ids: Array  # int32 [P]; the only tokens the generator and the trainer ever see
    columns: dict[str, Any]  # the data row; handed to the reward functions as keyword arguments


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to draw a completion. Log-probabilities are those of the distribution sampled from."""

    temperature: float  # 0.0 is greedy (evaluation only)
    top_p: float = 1.0
    max_tokens: int
    seed: int = 0  # with group id, completion index and position it fixes every random draw


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens start..end (end excluded) of a completion were sampled by policy `version`."""

    start: int
    end: int
    version: int


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of the model, and what the loss must know about where it came from."""

    token_ids: Array  # int32 [T], T >= 1; with finish_reason "stop" the last one is end-of-sequence
    logprobs: Array  # float32 [T] under the distribution that sampled the token
    versions: list[VersionSpan]  # cover 0..T without gaps; several when weights changed in flight
    finish_reason: FinishReason
    text: str  # decoded without special tokens
    t_start: float  # Unix time at which the prompt entered the engine's batch, seconds
    t_end: float  # Unix time of the last token, seconds

    @property
    def version_min(self) -> int:
        """Oldest policy version that produced a token; staleness is counted from here."""
        return min(span.version for span in self.versions)

    @property
    def version_max(self) -> int:
        return max(span.version for span in self.versions)


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Draw `num_generations` completions of one prompt."""

    purpose: Purpose
    group_id: int
    prompt_ids: Array  # int32 [P]
    num_generations: int
    sampling: SamplingParams


class GroupCompletions(msgspec.Struct, frozen=True, kw_only=True):
    """All completions of one request, in order of their index within the group."""

    purpose: Purpose
    group_id: int
    completions: list[Completion]


class TrainBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimizer step is computed from, as flat arrays (ragged rows, no padding)."""

    step: int  # the optimizer step this batch makes; the policy version becomes step + 1
    temperature: float  # of the rollouts; the trainer divides its logits by it
    prompt_ids: Array  # int32 [sum of prompt lengths]
    prompt_lengths: Array  # int32 [G]
    group_index: Array  # int32 [R], row of the prompt that rollout r answers
    completion_ids: Array  # int32 [N]
    completion_lengths: Array  # int32 [R]
    logprobs: Array  # float32 [N], behaviour policy
    loss_mask: Array  # bool [N], False where a token must not be trained
    advantages: Array  # float32 [R]
    logprobs_reference: Array | None = None  # float32 [N], for a KL term in the loss
    lags: Array | None = None  # int32 [N], version that is trained minus the token's: decoupled_ppo


class ReferenceItem(msgspec.Struct, frozen=True, kw_only=True):
    """A group whose log-probs under the reference are wanted."""

    group_id: int
    prompt_ids: Array  # int32 [P]
    completion_ids: list[Array]  # int32 [T] each


class ReferenceLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Of one group, in the order of its completions."""

    group_id: int
    logprobs: list[Array]  # float32 [T] each, at the temperature of the rollouts


class ParameterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor that the generators need, under its Hugging Face name. Tied tensors once."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # of the wire: "float32", "bfloat16", ...

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


class TensorPart(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of a tensor one rank of a tensor-parallel replica keeps."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    dim: int = 0  # that is cut
    start: int  # rows (dim 0) or columns (dim 1) [start, end)
    end: int

    @property
    def part_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.end - self.start, *self.shape[self.dim + 1 :])
