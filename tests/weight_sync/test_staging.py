"""Snapshots of random layouts, sent as deltas: what arrives is what the trainer holds."""

from __future__ import annotations

import random

import pytest
import torch

from llamarl_hpc.types import ParameterSpec
from llamarl_hpc.weight_sync.arena import arena_tensors
from llamarl_hpc.weight_sync.bench.weights import MadeUpWeights
from llamarl_hpc.weight_sync.collective.delta import Chart, apply
from llamarl_hpc.weight_sync.collective.loads import Load, broadcasts
from llamarl_hpc.weight_sync.collective.staging import Parcel, Staging
from llamarl_hpc.weight_sync.plan import Arena, Bucket, make_arena, make_plan

CPU = torch.device("cpu")
DELTA_BYTES = 1 << 18


def random_specs(rng: random.Random) -> list[ParameterSpec]:
    dtypes = ["bfloat16", "bfloat16", "float32", "float16"]
    shapes = [(1,), (7,), (576,), (130, 257), (64, 512), (300, 700)]
    return [
        ParameterSpec(name=f"p{k}", shape=rng.choice(shapes), dtype=rng.choice(dtypes))
        for k in range(rng.randrange(1, 14))
    ]


class Trainer:
    """Ranks that take snapshots of what they hold."""

    def __init__(self, rng: random.Random, size: int, *, sharded: bool) -> None:
        specs = random_specs(rng)
        self.arena = make_arena(specs)
        self.sources = [MadeUpWeights(specs, rank, size, sharded=sharded) for rank in range(size)]
        owned = [{s.name: source.owned_range(s.name) for s in specs} for source in self.sources]
        self.plan = make_plan(self.arena, owned, 1 << 17)
        self.staging = [
            Staging(self._of(rank), CPU, pinned=False, delta_bytes=DELTA_BYTES)
            for rank in range(size)
        ]

    def _of(self, rank: int) -> list[Bucket]:
        return [bucket for bucket in self.plan if bucket.root == rank]

    def send(self, version: int, base: int | None) -> dict[int, list[Parcel]]:
        for source, staging in zip(self.sources, self.staging, strict=True):
            source.step(version)
            staging.take(source, version)
        return {
            rank: staging.parcels(base)
            for rank, staging in enumerate(self.staging)
            if self._of(rank)
        }


def receive(
    arena: Arena, plan: list[Bucket], memory: torch.Tensor, parcels: dict[int, list[Parcel]]
) -> None:
    """As a receiver does, without a network."""
    loads = {
        root: [Load(num_buckets=len(parcel.buckets), delta=parcel.delta) for parcel in mine]
        for root, mine in parcels.items()
    }
    queues = {root: iter(mine) for root, mine in parcels.items()}
    for one in broadcasts(plan, loads):
        data = next(queues[one.root]).data
        buckets = [plan[number] for number in one.buckets]
        assert {bucket.root for bucket in buckets} == {one.root} and len(data) == one.num_bytes
        if one.delta is not None:
            apply(one.delta, data, Chart(arena, buckets, one.delta, CPU), memory)
            continue
        (bucket,) = buckets
        for piece in bucket.pieces:
            at = arena.position(piece.name, piece.dtype, piece.start)
            memory[at : at + piece.num_bytes] = data[piece.offset :][: piece.num_bytes]


@pytest.mark.parametrize("seed", range(12))
def test_deltas_of_any_layout_arrive_bit_by_bit(seed: int) -> None:
    rng = random.Random(seed)
    size, sharded = rng.randrange(1, 4), seed % 2 == 0
    trainer = Trainer(rng, size, sharded=sharded)
    memory = torch.zeros(trainer.arena.num_bytes, dtype=torch.uint8)
    for version in (1, 2, 3):
        parcels = trainer.send(version, None if version == 1 else version - 1)
        receive(trainer.arena, trainer.plan, memory, parcels)
        sent = sum(len(parcel.data) for mine in parcels.values() for parcel in mine)
        assert version == 1 or sent <= 0.1 * trainer.arena.num_bytes + 64
        for name, tensor in arena_tensors(trainer.arena, memory):
            for source in trainer.sources:
                start, end = source.owned_range(name) or (0, tensor.numel())
                found = tensor.reshape(-1)[start:end].view(torch.uint8)
                assert torch.equal(found, source.read(name, start, end).view(torch.uint8))


def test_small_buckets_share_a_delta_and_large_ones_have_their_own() -> None:
    trainer = Trainer(random.Random(3), 1, sharded=False)
    trainer.send(1, None)
    (parcels,) = trainer.send(2, 1).values()
    buckets = [number for parcel in parcels for number in parcel.buckets]
    assert buckets == list(range(len(trainer.plan))) and len(parcels) < len(buckets)
    for parcel in parcels:
        size = sum(trainer.plan[number].num_bytes for number in parcel.buckets)
        assert size <= DELTA_BYTES or len(parcel.buckets) == 1
