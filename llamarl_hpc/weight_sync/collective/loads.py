"""How the buckets of a version travel: each as it is, or neighbours of one rank as a delta."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

import msgspec

from llamarl_hpc.weight_sync.collective.delta import Delta
from llamarl_hpc.weight_sync.plan import Bucket


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer rank announces for its next buckets: a delta of all, or one as it is."""

    num_buckets: int
    delta: Delta | None


class Broadcast(msgspec.Struct, frozen=True, kw_only=True):
    """What travels at a time."""

    root: int
    buckets: list[int]  # their numbers in the plan
    num_bytes: int
    delta: Delta | None  # of all of them; None: it is one bucket as it is


def broadcasts(
    buckets: Sequence[Bucket], loads: Mapping[int, Sequence[Load]] | None
) -> list[Broadcast]:
    """All of a version, by first bucket, and so each rank's in the order in which it sends them.

    `loads`: what each rank has announced; None if every bucket travels as it is.
    """
    found: list[Broadcast] = []
    for root in roots(buckets):
        mine = [number for number, bucket in enumerate(buckets) if bucket.root == root]
        left = iter(mine)
        for load in whole(len(mine)) if loads is None else loads[root]:
            numbers = list(islice(left, load.num_buckets))
            size = buckets[numbers[0]].num_bytes if load.delta is None else load.delta.num_bytes
            found.append(Broadcast(root=root, buckets=numbers, num_bytes=size, delta=load.delta))
    return sorted(found, key=lambda one: one.buckets[0])


def roots(buckets: Sequence[Bucket]) -> list[int]:
    """The trainer ranks that send."""
    return sorted({bucket.root for bucket in buckets})


def whole(num_buckets: int) -> list[Load]:
    return [Load(num_buckets=1, delta=None)] * num_buckets
