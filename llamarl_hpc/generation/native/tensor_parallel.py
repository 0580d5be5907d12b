"""What the ranks of one replica exchange within a forward pass: sums, and the leader's logits.

    CPU   MPI, which knows how to sum within a node's memory: a sum of a few kilobytes takes a
          fraction of what it takes through gloo's sockets
    GPU   torch.distributed's default group (NCCL), made here

Sampled tokens need no exchange of their own: they are the next batch, which the leader shares
(`runner.py`), so ranks cannot come to differ in what they compute.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from llamarl_hpc.placement import World, init_process_group


class Ranks(Protocol):
    """All ranks make the same calls in the same order."""

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, on every rank; `x` may be overwritten."""

    def gather_logits(self, x: Tensor) -> Tensor | None:
        """[rows, vocabulary] from all ranks' [rows, their part of it]; None but on the leader."""


def join_ranks(world: World, device: torch.device, widths: Sequence[int]) -> Ranks | None:
    """A collective call. `widths`: logits of each rank. None for a replica of one rank."""
    if world.size == 1:
        return None
    if device.type == "cpu":
        return MpiRanks(world, widths)
    init_process_group(world, device=device.type)
    return GroupRanks(world, widths)


_SPINS, _PAUSE_S = 200, 20e-6  # looks without a pause, then the pause between two


class MpiRanks:
    """Over MPI, which knows no bf16: sums are float32, and so are the logits that are gathered.

    MPI's blocking calls spin for as long as they wait. Where ranks have no core each, the one that
    spins keeps the one that it waits for from running, so we look ourselves, and soon sleep.
    """

    def __init__(self, world: World, widths: Sequence[int]) -> None:
        self._comm = world.comm.Dup()  # other threads may use the world's own
        self._widths, self._is_leader = widths, world.is_leader

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        summand = x.float().contiguous()
        total = torch.empty_like(summand)
        _finish(self._comm.Iallreduce(summand.numpy(), total.numpy()))
        return total.to(x.dtype)

    def gather_logits(self, x: Tensor) -> Tensor | None:
        part = x.float().contiguous()
        if not self._is_leader:
            _finish(self._comm.Igatherv(part.numpy(), None))
            return None
        rows = len(part)
        found = torch.empty(rows * sum(self._widths))
        counts = [rows * width for width in self._widths]
        _finish(self._comm.Igatherv(part.numpy(), [found.numpy(), counts]))
        ends = list(accumulate(self._widths))
        spans = zip([0, *ends], ends, strict=False)
        return torch.cat([found[rows * a : rows * b].view(rows, b - a) for a, b in spans], dim=-1)


def _finish(request: Any) -> None:
    for _ in range(_SPINS):
        if request.Test():
            return
    while not request.Test():
        time.sleep(_PAUSE_S)


class GroupRanks:
    """Over torch.distributed's default group, in the model's own dtype."""

    def __init__(self, world: World, widths: Sequence[int]) -> None:
        self._widths, self._is_leader = widths, world.is_leader

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        torch.distributed.all_reduce(x)
        return x

    def gather_logits(self, x: Tensor) -> Tensor | None:
        if not self._is_leader:
            torch.distributed.send(x.contiguous(), dst=0)
            return None
        parts = [x]
        for rank, width in enumerate(self._widths[1:], start=1):
            parts.append(x.new_empty(len(x), width))
            torch.distributed.recv(parts[-1], src=rank)
        return torch.cat(parts, dim=-1)
