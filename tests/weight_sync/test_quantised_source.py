"""What trainer ranks send quantised, put together, is the quantised matrix, however it was cut."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sync_setup import ThreadWorld

from llamarl_hpc.models.int8 import quantised
from llamarl_hpc.placement import World
from llamarl_hpc.types import ParameterSpec
from llamarl_hpc.weight_sync import quantised_source
from llamarl_hpc.weight_sync.arena import torch_dtype
from llamarl_hpc.weight_sync.plan import Range, make_arena, make_plan
from llamarl_hpc.weight_sync.quantised_source import QuantisedSource

SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (40, 12),
    "model.layers.0.q_proj.weight": (24, 31),
    "model.layers.0.norm.weight": (31,),
    "model.layers.0.down_proj.weight": (3, 200),  # rows that several ranks share
    "model.layers.0.tiny.weight": (2, 2),  # late ranks hold nothing
    "model.layers.0.one.weight": (1, 50),
}


class Shards:
    """A `WeightSource` that lets nothing be read but what ZeRO would leave on the rank."""

    def __init__(self, rank: int, size: int, dtype: torch.dtype, *, sharded: bool) -> None:
        self.rank, self.size, self.sharded = rank, size, sharded
        self.dtype = dtype
        self.become(1)

    def become(self, version: int) -> None:
        generator = torch.Generator().manual_seed(version)
        self.tensors = {
            name: torch.randn(shape, generator=generator).to(self.dtype)
            for name, shape in SHAPES.items()
        }

    def parameter_specs(self) -> list[ParameterSpec]:
        dtype = str(self.dtype).removeprefix("torch.")
        return [ParameterSpec(name=n, shape=shape, dtype=dtype) for n, shape in SHAPES.items()]

    def owned_range(self, name: str) -> Range | None:
        numel = self.tensors[name].numel()
        shard = -(-numel // self.size)
        mine = min(self.rank * shard, numel), min((self.rank + 1) * shard, numel)
        return mine if self.sharded else None

    def read(self, name: str, start: int, end: int) -> torch.Tensor:
        first, last = self.owned_range(name) or (0, self.tensors[name].numel())
        assert first <= start < end <= last
        return self.tensors[name].view(-1)[start:end]


def on_ranks(size: int, work: Callable[[World], Any]) -> list[Any]:
    """What `work` gives on every rank; ranks are threads."""
    if size == 1:
        return [work(World())]
    shared: dict[str, Any] = {}
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        found[rank] = work(ThreadWorld(rank, size, shared))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    return [found[rank] for rank in range(size)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "sharded"), [(1, False), (1, True), (3, False), (2, True), (3, True), (7, True)]
)
def test_what_the_ranks_send_is_the_quantised_matrix(
    monkeypatch: pytest.MonkeyPatch, size: int, sharded: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(quantised_source, "_CHUNK_NUMEL", 150)
    ranks = [Shards(rank, size, dtype, sharded=sharded) for rank in range(size)]

    def send(world: World) -> list[dict[str, list[tuple[int, torch.Tensor]]]]:
        source = QuantisedSource(ranks[world.rank], world)
        specs = source.parameter_specs()
        owned = world.allgather({spec.name: source.owned_range(spec.name) for spec in specs})
        plan = make_plan(make_arena(specs), owned, 1)
        dice = random.Random(world.rank)
        versions = []
        for version in (1, 2):
            ranks[world.rank].become(version)
            source.measure()
            sent: dict[str, list[tuple[int, torch.Tensor]]] = {spec.name: [] for spec in specs}
            for bucket in plan:
                for piece in bucket.pieces if bucket.root == world.rank else []:
                    middle = dice.randint(piece.start + 1, piece.end)
                    for a, b in ((piece.start, middle), (middle, piece.end)):
                        if a < b:
                            data = source.read(piece.name, a, b)
                            assert data.dtype == torch_dtype(piece.dtype) and data.shape == (b - a,)
                            sent[piece.name].append((a, data.clone()))
            versions.append(sent)
        return versions

    by_rank = on_ranks(size, send)
    for number, version in enumerate((1, 2)):
        ranks[0].become(version)
        expected = dict(quantised(ranks[0].tensors.items()))
        assert list(by_rank[0][number]) == list(expected) and len(expected) == 6 + 4
        for name, tensor in expected.items():
            pieces = sorted((p for sent in by_rank for p in sent[number][name]), key=lambda p: p[0])
            whole = torch.cat([data for _, data in pieces])
            assert torch.equal(whole.view(tensor.shape), tensor), name


def test_ranks_agree_only_where_rows_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    maximum = ThreadWorld.maximum

    def counted(self: ThreadWorld, values: Any) -> Any:
        calls.append(len(values))
        return maximum(self, values)

    monkeypatch.setattr(ThreadWorld, "maximum", counted)
    for sharded in (False, True):

        def send(world: World, sharded: bool = sharded) -> None:
            source = QuantisedSource(
                Shards(world.rank, world.size, torch.float32, sharded=sharded), world
            )
            source.measure()

        on_ranks(3, send)
    # q_proj 744 elements of 31, cut at 248 (a row's start) and 496 (also); down_proj at 200 and
    # 400 (row starts); tiny at 2 (row start); one at 17 and 34 (the same row)
    assert calls == [1, 1, 1]
