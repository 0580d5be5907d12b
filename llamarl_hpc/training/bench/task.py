"""What `llamarl-hpc bench train` and its processes tell each other, and the rollouts they share.

Rollouts are made up: what a training step costs depends on their lengths, not on their words.
Every completion has the same length, so that nobody pads.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from llamarl_hpc.types import Array, TrainBatch

Side = Literal["trl", "ours", "ours_skipping"]
SIDES: tuple[Side, ...] = ("trl", "ours", "ours_skipping")
FIRST_TOKEN = 10  # below lie the special tokens


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is told."""

    side: Side
    model: str  # folder
    vocabulary: int
    threads: int
    prompts: int
    completions: int  # of each prompt
    prompt_tokens: int
    completion_tokens: int
    accuracy: float  # share of right completions; decides how many groups are constant
    zero_stage: int
    micro_batch_tokens: int
    trl_rows: int  # completions in one pass of TRL
    trl_checkpointing: bool
    trl_own_environment: bool  # not that of a job step, whose allocator settings make it faster
    pipe: int  # file descriptor

    @property
    def learnable_prompts(self) -> int:
        """Groups with both right and wrong completions, as expected at `accuracy`; at least one."""
        constant = self.accuracy**self.completions + (1 - self.accuracy) ** self.completions
        return max(round(self.prompts * (1 - constant)), 1)


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model is loaded and one step has been made."""

    imports_bytes: int  # resident before the model was loaded


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One optimizer step."""

    seconds: float
    cpu_s: float  # of all threads
    grad_norm: (
        float  # before clipping: that all sides have the same one shows that they do the same
    )
    peak_bytes: int  # resident, of the process since its start


def rewards(task: Task) -> list[float]:
    """1.0 for the first completion of the learnable prompts, else 0.0; [prompts * completions]."""
    values = np.zeros((task.prompts, task.completions))
    values[: task.learnable_prompts, 0] = 1.0
    return [float(value) for value in values.flatten()]


def token_ids(task: Task) -> tuple[Array, Array]:
    """int32 prompts [P, prompt tokens] and completions [P * completions, completion tokens]."""
    rng = np.random.default_rng(0)

    def draw(rows: int, length: int) -> Array:
        return rng.integers(FIRST_TOKEN, task.vocabulary, (rows, length)).astype(np.int32)

    prompts = draw(task.prompts, task.prompt_tokens)
    return prompts, draw(task.prompts * task.completions, task.completion_tokens)


def train_batch(task: Task) -> TrainBatch:
    """The rollouts as our trainer gets them; behaviour log-probs are not filled in."""
    prompts, completions = token_ids(task)
    given = np.array(rewards(task), dtype=np.float32).reshape(task.prompts, task.completions)
    return TrainBatch(
        step=0,
        temperature=1.0,
        prompt_ids=prompts.flatten(),
        prompt_lengths=np.full(len(prompts), task.prompt_tokens, dtype=np.int32),
        group_index=np.repeat(np.arange(task.prompts, dtype=np.int32), task.completions),
        completion_ids=completions.flatten(),
        completion_lengths=np.full(len(completions), task.completion_tokens, dtype=np.int32),
        logprobs=np.zeros(completions.size, dtype=np.float32),
        loss_mask=np.ones(completions.size, dtype=bool),
        advantages=(given - given.mean(axis=1, keepdims=True)).flatten(),
    )
