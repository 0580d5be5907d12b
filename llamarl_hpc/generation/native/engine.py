"""The native generation engine: continuous batching over a KV cache, in plain PyTorch.

One `step` is one forward pass: it decodes a token for every running sequence and computes the
prompts of the groups that start, all in one packed batch. A group's prompt is computed once for
all its completions, and what it has in common with an earlier prompt (system message, template)
is copied instead of computed, as long as the weights are the same.

For equal weights, tokens and log-probabilities of a completion do not depend on what else runs at
the time: draws are counter-based, and rows are given to the kernels in shapes for which torch's CPU
kernels compute each row by itself (checked bit for bit on AVX-512; elsewhere to rounding).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.generation.native.model import PackedBatch, PromptRows
from llamarl_hpc.generation.native.runner import ModelRunner
from llamarl_hpc.generation.native.sampler import sample, uniform_draws
from llamarl_hpc.generation.native.scheduler import RunningGroup, RunningSequence, Scheduler
from llamarl_hpc.models.load import stop_token_ids
from llamarl_hpc.models.tokenizer import Decoder
from llamarl_hpc.placement import World
from llamarl_hpc.types import (
    Completion,
    GenerationRequest,
    GroupCompletions,
    Purpose,
    TensorPart,
)

_LENGTH_GRAIN = 16  # decoding attends over a multiple of so many tokens; fewer distinct shapes
_MIN_SHARED = 8  # a shorter common prefix is not worth keeping the reference for


class NativeEngine:
    """Implements `generation.base.GenerationEngine` for one device.

    A group starts whole, so `num_generations` may not exceed `max_concurrency`.
    """

    policy_version: int

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str | torch.dtype,
        max_concurrency: int,
        prefill_tokens: int,
        max_context: int,
        device: str = "cpu",
        recompute_kv_cache: bool = False,
        world: World | None = None,
        int8: bool = False,
    ) -> None:
        """Load the model in `folder` (policy version 0). Raises ConfigError if it cannot run.

        `recompute_kv_cache`: whether new weights mean new keys and values for what is running.
        `int8`: the layers' matrices are kept as 8-bit integers, and `load_weights` wants them so.
        `world`: this is rank 0 of it, and its other ranks follow (`runner.ModelRunner.follow`).
        """
        self._runner = ModelRunner(
            folder,
            dtype=dtype,
            slots=max_concurrency,
            max_context=max_context,
            device=device,
            world=world or World(),
            int8=int8,
        )
        self.policy_version = 0
        self._device = torch.device(device)
        self._decoder = Decoder(folder)
        self._stop_ids = stop_token_ids(folder, self._decoder.eos_token_id)
        self._scheduler = Scheduler(
            max_concurrency=max_concurrency,
            prefill_tokens=prefill_tokens,
            max_context=max_context,
        )
        self._prefill_tokens, self._recompute_kv_cache = prefill_tokens, recompute_kv_cache
        self._paused = False
        self._tokens_processed = 0
        self._prefix: list[int] = []  # prompt whose keys and values the prefix slot holds

    # ------------------------------------------------------------------ what the executor calls

    def submit(self, request: GenerationRequest) -> None:
        """Queue a group. Raises ConfigError when it can never run."""
        self._scheduler.check(request)
        outside = [i for i in request.prompt_ids.tolist() if not 0 <= i < self._runner.vocab_size]
        if outside:
            raise ConfigError(
                f"the prompt of group {request.group_id} holds token {outside[0]}, but the "
                f"model's vocabulary has {self._runner.vocab_size}; use the model's own tokenizer"
            )
        self._scheduler.submit(request)

    @torch.inference_mode()
    def step(self) -> list[GroupCompletions]:
        """Start what fits, sample one token for every running sequence; groups now complete."""
        running = list(self._scheduler.running)
        now = time.time()
        admitted = [] if self._paused else self._scheduler.admit(uniform_draws, now)
        if not running and not admitted:
            return []
        self._runner.reserve(
            max((_final_length(group.request) for group in admitted), default=0), len(running)
        )
        batch = self._pack(running, admitted)
        logits = self._runner.forward(batch)
        self._share_prompts(admitted)
        completed = self._sample(logits, admitted)
        return [self._completions(group) for group in completed]

    def pause_admission(self, paused: bool) -> None:
        """While paused, queued groups wait and running ones go on."""
        self._paused = paused

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy in a complete set of weights; running sequences go on, with the keys and values
        that they have, or with new ones (`recompute_kv_cache`).

        Raises WeightSyncError when the set is not the model's; then the weights are mixed and
        the engine must not be used any more.
        """
        self._runner.load_weights(tensors)
        self._prefix = []
        self.policy_version = version
        if self._recompute_kv_cache:
            self._recompute()

    def parts(self) -> list[TensorPart]:
        """What this rank keeps of every weight; `load_weights` takes each whole, or so much."""
        return self._runner.parts

    def abort_all(self) -> list[tuple[Purpose, int]]:
        """Forget all running and waiting groups; returns their (purpose, group id)."""
        return self._scheduler.abort_all()

    @property
    def num_running(self) -> int:
        """Sequences being decoded."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Groups not started yet."""
        return self._scheduler.num_waiting

    @property
    def tokens_processed(self) -> int:
        """Prompt tokens (once per group, shared prefixes included) plus tokens sampled."""
        return self._tokens_processed

    # ------------------------------------------------------------------ one step

    def _pack(self, running: list[RunningSequence], admitted: list[RunningGroup]) -> PackedBatch:
        """One row per running sequence, then the prompts' own rows."""
        token_ids = [sequence.token_ids[-1] for sequence in running]
        positions = [sequence.length - 1 for sequence in running]
        longest = -(-(max(positions, default=0) + 1) // _LENGTH_GRAIN) * _LENGTH_GRAIN
        sampled = list(range(len(running)))
        prompts: list[PromptRows] = []
        if admitted and _common_prefix(self._prefix, _prompt(admitted[0])) < _MIN_SHARED:
            self._prefix = []
        reference = self._prefix or (_prompt(admitted[0]) if admitted else [])
        for group in admitted:
            ids = _prompt(group)
            shared = 0
            if self._prefix or prompts:
                shared = min(_common_prefix(ids, reference), len(ids) - 1)
            shared = shared if shared >= _MIN_SHARED else 0
            prompts.append(
                PromptRows(
                    start=len(token_ids),
                    end=len(token_ids) + len(ids) - shared,
                    slot=group.sequences[0].slot,
                    length=len(ids),
                    shared=shared,
                    source=self._runner.prefix_slot
                    if self._prefix
                    else admitted[0].sequences[0].slot,
                )
            )
            token_ids += ids[shared:]
            positions += range(shared, len(ids))
            sampled.append(len(token_ids) - 1)
        return PackedBatch(
            token_ids=token_ids,
            positions=positions,
            num_decoding=len(running),
            longest=longest,
            prompts=prompts,
            sampled_rows=sampled,
        )

    def _share_prompts(self, admitted: list[RunningGroup]) -> None:
        """Give the prompt's keys and values to all completions of a group; keep one prompt."""
        for group in admitted:
            first, *others = [sequence.slot for sequence in group.sequences]
            self._runner.copy(first, others, len(group.request.prompt_ids))
        if admitted and not self._prefix:
            self._prefix = _prompt(admitted[0])
            slot = admitted[0].sequences[0].slot
            self._runner.copy(slot, [self._runner.prefix_slot], len(self._prefix))

    def _recompute(self) -> None:
        """Keys and values of all running sequences anew; a group's prompt once, as at its start."""
        firsts: dict[int, RunningSequence] = {}  # of each group
        token_ids: list[int] = []
        positions: list[int] = []
        prompts: list[PromptRows] = []
        for sequence in self._scheduler.running:
            group = sequence.group
            first = firsts.setdefault(id(group), sequence)
            ids = [*_prompt(group), *sequence.token_ids[:-1]]  # the newest one has none yet
            shared = 0 if first is sequence else min(len(_prompt(group)), len(ids) - 1)
            start, end = len(token_ids), len(token_ids) + len(ids) - shared
            prompts.append(
                PromptRows(
                    start=start,
                    end=end,
                    slot=sequence.slot,
                    length=len(ids),
                    shared=shared,
                    source=first.slot,
                )
            )
            token_ids += ids[shared:]
            positions += range(shared, len(ids))
            if len(token_ids) >= self._prefill_tokens:
                self._compute(token_ids, positions, prompts)
                token_ids, positions, prompts = [], [], []
        if prompts:
            self._compute(token_ids, positions, prompts)

    def _compute(
        self, token_ids: list[int], positions: list[int], prompts: list[PromptRows]
    ) -> None:
        """A forward pass for its keys and values alone."""
        batch = PackedBatch(
            token_ids=token_ids,
            positions=positions,
            num_decoding=0,
            longest=0,
            prompts=prompts,
            sampled_rows=[0],
        )
        self._runner.forward(batch)

    def _sample(self, logits: Tensor, admitted: list[RunningGroup]) -> list[RunningGroup]:
        """One token for every running sequence; returns the groups that are complete now."""
        sequences = self._scheduler.running
        if admitted:  # a prompt's logits serve all completions of its group
            num_decoding = len(logits) - len(admitted)
            rows = list(range(num_decoding))
            for i, group in enumerate(admitted):
                rows += [num_decoding + i] * group.request.num_generations
            logits = logits[torch.tensor(rows, device=self._device)]
        params = [sequence.group.request.sampling for sequence in sequences]
        token_ids, logprobs = sample(
            logits,
            [p.temperature for p in params],
            [p.top_p for p in params],
            [float(sequence.draws[len(sequence.token_ids)]) for sequence in sequences],
        )
        self._tokens_processed += len(token_ids)
        self._tokens_processed += sum(len(group.request.prompt_ids) for group in admitted)
        completed, moves = self._scheduler.record(
            token_ids,
            logprobs,
            version=self.policy_version,
            stop_ids=self._stop_ids,
            now=time.time(),
        )
        for move in moves:
            self._runner.copy(move.source, [move.target], move.length)
        return completed

    def _completions(self, group: RunningGroup) -> GroupCompletions:
        texts = self._decoder.texts([sequence.token_ids for sequence in group.sequences])
        completions = [_completion(s, t) for s, t in zip(group.sequences, texts, strict=True)]
        request = group.request
        return GroupCompletions(
            purpose=request.purpose, group_id=request.group_id, completions=completions
        )


def _completion(sequence: RunningSequence, text: str) -> Completion:
    assert sequence.finish_reason is not None
    return Completion(
        token_ids=np.array(sequence.token_ids, dtype=np.int32),
        logprobs=np.array(sequence.logprobs, dtype=np.float32),
        versions=sequence.versions,
        finish_reason=sequence.finish_reason,
        text=text,
        t_start=sequence.t_start,
        t_end=sequence.t_end,
    )


def _prompt(group: RunningGroup) -> list[int]:
    ids: list[int] = group.request.prompt_ids.tolist()
    return ids


def _final_length(request: GenerationRequest) -> int:
    return len(request.prompt_ids) + request.sampling.max_tokens


def _common_prefix(first: list[int], second: list[int]) -> int:
    """Number of leading tokens that two prompts share."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
