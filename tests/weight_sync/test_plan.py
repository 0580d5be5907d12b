"""The plan: every element once, sent by a rank that holds it, in bounded and balanced buckets."""

from __future__ import annotations

import random

import pytest

from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.types import ParameterSpec
from llamarl_hpc.weight_sync.plan import (
    ALIGNMENT,
    GRAIN,
    ITEM_BYTES,
    Bucket,
    Range,
    arena_start,
    make_arena,
    make_plan,
)


def random_specs(rng: random.Random, num: int) -> list[ParameterSpec]:
    dtypes = ["float32", "bfloat16", "float16", "float64"]
    sizes = [0, 1, 3, 64, 1000, 40_000, 300_000]
    return [
        ParameterSpec(name=f"p{i}", shape=(rng.choice(sizes) + rng.randint(0, 3),), dtype=d)
        for i, d in enumerate(rng.choices(dtypes, k=num))
    ]


def zero3_ranges(numel: int, num_ranks: int) -> list[Range]:
    shard = -(-numel // num_ranks)
    return [(min(r * shard, numel), min((r + 1) * shard, numel)) for r in range(num_ranks)]


def coverage(buckets: list[Bucket], specs: list[ParameterSpec]) -> None:
    ranges: dict[str, list[Range]] = {spec.name: [] for spec in specs}
    for bucket in buckets:
        end = 0
        for piece in bucket.pieces:
            assert piece.offset >= end and piece.offset % ALIGNMENT == 0
            end = piece.offset + piece.num_bytes
            ranges[piece.name].append((piece.start, piece.end))
        assert bucket.num_bytes == end
    for spec in specs:
        at = 0
        for start, end in sorted(ranges[spec.name]):
            assert start == at and end > start
            at = end
        assert at == spec.numel


@pytest.mark.parametrize("seed", range(30))
def test_every_element_is_sent_exactly_once_by_a_rank_that_holds_it(seed: int) -> None:
    rng = random.Random(seed)
    specs = random_specs(rng, rng.randint(1, 40))
    num_ranks = rng.choice([1, 2, 3, 4, 7])
    sharded = {spec.name for spec in specs if rng.random() < rng.choice([0.0, 0.5, 1.0])}
    owned: list[dict[str, Range | None]] = [{} for _ in range(num_ranks)]
    for spec in specs:
        ranges = zero3_ranges(spec.numel, num_ranks)
        for rank in range(num_ranks):
            owned[rank][spec.name] = ranges[rank] if spec.name in sharded else None
    arena = make_arena(specs)
    bucket_bytes = rng.choice([1, GRAIN, 3 * GRAIN + 5, 1 << 20, 1 << 26])
    buckets = make_plan(arena, owned, bucket_bytes)
    coverage(buckets, specs)
    for bucket in buckets:
        assert bucket.num_bytes <= max(bucket_bytes, GRAIN)
        for piece in bucket.pieces:
            held = owned[bucket.root][piece.name]
            assert held is None or (held[0] <= piece.start and piece.end <= held[1])


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_whole_parameters_are_shared_out_evenly_and_lie_as_in_the_arena(num_ranks: int) -> None:
    specs = [ParameterSpec(name=f"p{i}", shape=(500, 300 + i), dtype="float32") for i in range(20)]
    arena = make_arena(specs)
    buckets = make_plan(arena, [{s.name: None for s in specs}] * num_ranks, 1 << 20)
    sent = [0] * num_ranks
    for bucket in buckets:
        sent[bucket.root] += sum(piece.num_bytes for piece in bucket.pieces)
        assert arena_start(arena, bucket) is not None
    assert sum(sent) == sum(spec.numel * 4 for spec in specs)
    assert max(sent) - min(sent) <= num_ranks * GRAIN
    assert [bucket.root for bucket in buckets[:num_ranks]] == list(range(num_ranks))


def test_whole_parameters_make_up_for_uneven_shards() -> None:
    specs = [
        ParameterSpec(name="sharded", shape=(1 << 20,), dtype="float32"),
        ParameterSpec(name="whole", shape=(1 << 20,), dtype="float32"),
    ]
    owned: list[dict[str, Range | None]] = [
        {"sharded": (0, 1 << 20), "whole": None},
        {"sharded": (0, 0), "whole": None},
    ]
    buckets = make_plan(make_arena(specs), owned, 1 << 30)
    assert {(b.root, p.name) for b in buckets for p in b.pieces} == {(0, "sharded"), (1, "whole")}


def test_a_zero3_shard_stays_with_its_owner() -> None:
    specs = [ParameterSpec(name="w", shape=(130, 64), dtype="bfloat16")]
    owned: list[dict[str, Range | None]] = [{"w": (0, 4161)}, {"w": (4161, 8320)}]
    buckets = make_plan(make_arena(specs), owned, 1 << 20)
    assert [(b.root, b.pieces[0].start, b.pieces[0].end) for b in buckets] == [
        (0, 0, 4161),
        (1, 4161, 8320),
    ]


def test_the_arena_keeps_parameters_apart_and_aligned() -> None:
    rng = random.Random(1)
    specs = random_specs(rng, 50)
    arena = make_arena(specs)
    end = 0
    for spec in specs:
        assert arena.offsets[spec.name] % ALIGNMENT == 0 and arena.offsets[spec.name] >= end
        end = arena.offsets[spec.name] + spec.numel * ITEM_BYTES[spec.dtype]
    assert end <= arena.num_bytes < end + ALIGNMENT


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(0, 50), (60, 100)], "elements 50:60"),
        ([(0, 60), (50, 100)], "elements 50:60"),
        ([(0, 50), (50, 99)], "has 100 elements but the trainer ranks hold 99"),
        ([(0, 50), (50, 101)], "hold 101"),
        ([(0, 0), (0, 0)], "hold 0"),
        ([None, (0, 100)], "whole on trainer rank 0 but sharded on rank 1"),
    ],
)
def test_ranges_that_do_not_cover_a_parameter_once_are_refused(
    ranges: list[Range | None], message: str
) -> None:
    specs = [ParameterSpec(name="w", shape=(100,), dtype="float32")]
    with pytest.raises(WeightSyncError, match=message):
        make_plan(make_arena(specs), [{"w": r} for r in ranges], 1 << 20)


def test_a_name_twice_and_an_unknown_dtype_are_refused() -> None:
    spec = ParameterSpec(name="w", shape=(1,), dtype="float32")
    with pytest.raises(WeightSyncError, match="twice"):
        make_arena([spec, spec])
    with pytest.raises(WeightSyncError, match="complex64"):
        make_arena([ParameterSpec(name="w", shape=(1,), dtype="complex64")])
