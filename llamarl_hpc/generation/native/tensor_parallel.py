"""What the ranks of one replica exchange within a forward pass: sums, and the leader's logits.

    CPU   MPI on the world's own communicator: a sum of a few kilobytes takes microseconds where
          ranks share memory, tens of times less than through gloo's sockets
    GPU   torch.distributed's default group (NCCL), made here

Sampled tokens need no exchange of their own: they are the next batch, which the leader shares
(`runner.py`), so ranks cannot come to differ in what they compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

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


class MpiRanks:
    """Over MPI, which knows no bf16: sums are float32, and so are the logits that are gathered."""

    def __init__(self, world: World, widths: Sequence[int]) -> None:
        self._comm, self._widths, self._is_leader = world.comm, widths, world.is_leader

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        summand = x.float().contiguous()
        total = torch.empty_like(summand)
        self._comm.Allreduce(summand.numpy(), total.numpy())
        return total.to(x.dtype)

    def gather_logits(self, x: Tensor) -> Tensor | None:
        part = x.float().contiguous()
        if not self._is_leader:
            self._comm.Gatherv(part.numpy(), None)
            return None
        rows = len(part)
        found = torch.empty(rows * sum(self._widths))
        self._comm.Gatherv(part.numpy(), [found.numpy(), [rows * w for w in self._widths]])
        ends = list(accumulate(self._widths))
        spans = zip([0, *ends], ends, strict=False)
        return torch.cat([found[rows * a : rows * b].view(rows, b - a) for a, b in spans], dim=-1)


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
