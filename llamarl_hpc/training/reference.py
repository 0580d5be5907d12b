"""The frozen policy that the KL term compares with: tokens in, their log-probs out.

Every rank holds a whole copy and computes its share of the groups; there is no collective but the
gathering of the answers. With `offload` the copy lies in main memory and is on the device only
while it computes. docs/algorithms.md says when it becomes a newer policy.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from llamarl_hpc.batching.packing import micro_batches_of_rank
from llamarl_hpc.config.schema import Config
from llamarl_hpc.placement import World
from llamarl_hpc.training.policy import build_policy, forward_inputs
from llamarl_hpc.types import Array, ReferenceItem, ReferenceLogprobs, TrainBatch

log = logging.getLogger(__name__)


class Reference:
    """`step` counts the optimizer steps that the policy had made when it became this reference."""

    def __init__(
        self,
        config: Config,
        world: World,
        model_folder: Path,
        *,
        device: torch.device,
        offload: bool,
    ) -> None:
        self._config, self._world, self._device = config, world, device
        self._offload = offload and device.type != "cpu"
        self.load(0, model_folder)

    def load(self, step: int, model_folder: Path) -> None:
        """Become what lies in `model_folder`. Raises ConfigError when that is no model."""
        policy = build_policy(self._config, model_folder).eval().requires_grad_(False)
        if self._offload:
            for buffer in policy.buffers():
                buffer.data = buffer.data.to(self._device)
            for parameter in policy.parameters():
                parameter.data = parameter.data.pin_memory()
        else:
            policy = policy.to(self._device)
        self._policy, self.step = policy, step
        log.info("the reference is %s, the policy after %d steps", model_folder, step)

    def logprobs(
        self, items: Sequence[ReferenceItem], temperature: float
    ) -> list[ReferenceLogprobs]:
        """Of every token of `items`, which all ranks are given. Collective; empty on ranks other
        than the leader."""
        batch = _batch_of(items, temperature)
        trainer = self._config.trainer
        micro_batches = micro_batches_of_rank(
            batch,
            np.ones(len(batch.completion_ids)),
            rank=self._world.rank,
            num_ranks=self._world.size,
            micro_batch_tokens=self._config.reference.micro_batch_tokens
            or trainer.micro_batch_tokens,
            share_prompt=trainer.share_prompt,
        )
        mine: list[tuple[Array, Array]] = []
        with self._on_device(), torch.no_grad():
            for micro_batch in micro_batches:
                if micro_batch.num_tokens == 0:
                    continue
                inputs = forward_inputs(micro_batch, temperature=temperature, device=self._device)
                logprobs_K, _ = self._policy(**inputs)
                mine.append((micro_batch.flat_index, logprobs_K.float().cpu().numpy()))
        shares = self._world.gather(mine)
        if shares is None:
            return []
        flat = np.full(len(batch.completion_ids), np.nan, dtype=np.float32)
        for share in shares:
            for index, values in share:
                flat[index] = values
        assert not np.isnan(flat).any(), "the reference left out a token"
        return _by_group(items, flat)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """The weights are where the computation is; afterwards where they live."""
        if not self._offload:
            yield
            return
        parameters = list(self._policy.parameters())
        at_home = [parameter.data for parameter in parameters]
        for parameter, data in zip(parameters, at_home, strict=True):
            parameter.data = data.to(self._device, non_blocking=True)
        try:
            yield
        finally:  # nothing changed: the copies are dropped, not brought back
            for parameter, data in zip(parameters, at_home, strict=True):
                parameter.data = data


def _batch_of(items: Sequence[ReferenceItem], temperature: float) -> TrainBatch:
    completions = [ids for item in items for ids in item.completion_ids]
    lengths = np.array([len(ids) for ids in completions], dtype=np.int32)
    num_tokens = int(lengths.sum())
    sizes = [len(item.completion_ids) for item in items]
    return TrainBatch(
        step=0,
        temperature=temperature,
        prompt_ids=np.concatenate([item.prompt_ids for item in items]),
        prompt_lengths=np.array([len(item.prompt_ids) for item in items], dtype=np.int32),
        group_index=np.repeat(np.arange(len(items), dtype=np.int32), sizes),
        completion_ids=np.concatenate(completions),
        completion_lengths=lengths,
        logprobs=np.zeros(num_tokens, dtype=np.float32),
        loss_mask=np.ones(num_tokens, dtype=bool),
        advantages=np.zeros(len(completions), dtype=np.float32),
    )


def _by_group(items: Sequence[ReferenceItem], flat: Array) -> list[ReferenceLogprobs]:
    groups, start = [], 0
    for item in items:
        logprobs = []
        for ids in item.completion_ids:
            logprobs.append(flat[start : start + len(ids)])
            start += len(ids)
        groups.append(ReferenceLogprobs(group_id=item.group_id, logprobs=logprobs))
    return groups
