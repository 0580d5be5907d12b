"""Trainer layout x replica layout: every element that a rank keeps, once, from the right place."""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import prod

import msgspec
import pytest
import torch

from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.types import ParameterSpec, TensorPart
from llamarl_hpc.weight_sync.arena import arena_tensors, torch_dtype
from llamarl_hpc.weight_sync.collective.group import Window
from llamarl_hpc.weight_sync.collective.landing import PartsLanding, Ring
from llamarl_hpc.weight_sync.collective.loads import broadcasts
from llamarl_hpc.weight_sync.collective.rendezvous import Layout
from llamarl_hpc.weight_sync.plan import (
    GRAIN,
    ITEM_BYTES,
    Bucket,
    Piece,
    Range,
    check_same_plan,
    make_arena,
    make_plan,
    plan_hash,
)
from llamarl_hpc.weight_sync.targets import check_tiling, parts_arena, rectangles

CPU = torch.device("cpu")


def random_specs(rng: random.Random) -> list[ParameterSpec]:
    """Matrices, vectors, a scalar; int8 as after quantising, dtypes mixed."""
    shapes: list[tuple[int, ...]] = [(), (1,), (7,), (576,), (64, 96), (33, 257), (300, 130)]
    shapes += [(5, 6, 7), (2, 3, 40)]
    return [
        ParameterSpec(name=f"p{k}", shape=rng.choice(shapes), dtype=rng.choice(list(ITEM_BYTES)))
        for k in range(rng.randrange(1, 16))
    ]


def random_owned(
    rng: random.Random, specs: list[ParameterSpec], size: int, stage: int
) -> list[dict[str, Range | None]]:
    """What the ranks of a trainer hold. With ZeRO-3, equal shards with padding at the end, but for
    what every rank keeps whole (frozen, or small)."""
    owned: list[dict[str, Range | None]] = [{} for _ in range(size)]
    for spec in specs:
        whole = stage < 3 or rng.random() < 0.2
        shard = -(-spec.numel // size)
        for rank in range(size):
            span = (min(rank * shard, spec.numel), min((rank + 1) * shard, spec.numel))
            owned[rank][spec.name] = None if whole else span
    return owned


def random_parts(
    rng: random.Random, specs: list[ParameterSpec], size: int
) -> list[list[TensorPart]]:
    """What the ranks of a replica keep, in an order of their own. Cuts are uneven; neighbours may
    keep the same (kv heads that are fewer than ranks), and some tensors are not named."""
    ranks: list[list[TensorPart]] = [[] for _ in range(size)]
    for spec in rng.sample(specs, len(specs)):
        if not spec.shape or rng.random() < 0.2:
            continue
        dim = rng.randrange(len(spec.shape))
        length = spec.shape[dim]
        groups = rng.choice([g for g in (1, size, max(size // 2, 1)) if g <= length])
        cuts = [0, *sorted(rng.sample(range(1, length), groups - 1)), length]
        for rank in range(size):
            k = rank * groups // size
            ranks[rank].append(
                TensorPart(
                    name=spec.name, shape=spec.shape, dim=dim, start=cuts[k], end=cuts[k + 1]
                )
            )
    return ranks


def places(spec: ParameterSpec) -> torch.Tensor:
    """A value for every element that tells it from its neighbours."""
    return (torch.arange(spec.numel) % 113).to(torch_dtype(spec.dtype)).view(spec.shape)


def sent(bucket: Bucket, values: dict[str, torch.Tensor]) -> torch.Tensor:
    """The bucket as its sender fills it."""
    memory = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    for piece in bucket.pieces:
        raw = values[piece.name].reshape(-1)[piece.start : piece.end].view(torch.uint8)
        memory[piece.offset :][: piece.num_bytes] = raw
    return memory


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Copies of a few elements are not worth waking others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("seed", range(24))
def test_every_rank_gets_what_it_keeps_once_from_the_right_place(seed: int) -> None:
    rng = random.Random(seed)
    specs, stage = random_specs(rng), seed % 4
    trainers, ranks = rng.randrange(1, 5), rng.randrange(1, 5)
    arena = make_arena(specs)
    owned = random_owned(rng, specs, trainers, stage)
    plan = make_plan(arena, owned, rng.choice([GRAIN, 3 * GRAIN, 1 << 22]))
    values = {spec.name: places(spec) for spec in specs}

    # a broadcast has no less to send than every byte once
    total = sum(spec.numel * ITEM_BYTES[spec.dtype] for spec in specs)
    assert sum(piece.num_bytes for bucket in plan for piece in bucket.pieces) == total
    for bucket in plan:
        for piece in bucket.pieces:
            held = owned[bucket.root][piece.name]
            assert held is None or held[0] <= piece.start < piece.end <= held[1]

    layout = Layout(arena=arena, buckets=plan, device="cpu", verify="off")
    parts_of_ranks = random_parts(rng, specs, ranks)
    check_tiling(parts_of_ranks)
    for parts in parts_of_ranks:
        landing = PartsLanding(layout, CPU, parts)
        written = {spec.name: torch.zeros(spec.numel) for spec in landing.arena.specs}
        named = {part.name: part for part in parts}
        for one in broadcasts(plan, None):
            target = landing.target(one)
            bucket = plan[one.buckets[0]]
            target.copy_(sent(bucket, values))
            landing.take(one, target, 1)
            for piece in bucket.pieces:
                if piece.name not in named:
                    written[piece.name][piece.start : piece.end] += 1
                    continue
                found = rectangles(piece, named[piece.name])
                assert len(found) <= (3 if named[piece.name].dim else 1)
                for r in found:
                    count = written[piece.name]
                    count.as_strided((r.rows, r.width), (r.target_stride, 1), r.target).add_(1)
        assert all(bool((count == 1).all()) for count in written.values())
        for name, tensor in arena_tensors(landing.arena, landing.memory):
            wanted = values[name]
            if (part := named.get(name)) is not None:
                wanted = wanted.narrow(part.dim, part.start, part.end - part.start)
            assert tensor.shape == wanted.shape and torch.equal(tensor, wanted)


def test_the_memory_of_parts_is_these_and_a_few_buckets() -> None:
    specs = [ParameterSpec(name=f"w{k}", shape=(1024, 1024), dtype="float32") for k in range(16)]
    arena = make_arena(specs)
    plan = make_plan(arena, [{s.name: None for s in specs}], 1 << 20)
    layout = Layout(arena=arena, buckets=plan, device="cpu", verify="full")
    parts = [
        TensorPart(name=s.name, shape=s.shape, dim=k % 2, start=0, end=256)
        for k, s in enumerate(specs)
    ]
    landing = PartsLanding(layout, CPU, parts)
    assert len(landing.memory) == arena.num_bytes // 4
    assert landing.num_bytes - len(landing.memory) <= 6 << 20


@pytest.mark.parametrize("seed", range(20))
def test_what_is_under_way_never_shares_a_byte_of_the_ring(seed: int) -> None:
    rng = random.Random(seed)
    largest = rng.choice([1, 100, 5000, 1 << 16])
    sizes = [rng.choice([largest, rng.randint(1, largest), 1]) for _ in range(300)]
    ring, window = Ring(max(sizes), CPU), Window(sizes)
    under_way: list[torch.Tensor] = []
    for number, size in enumerate(sizes):
        while window.is_full(number):
            under_way.pop(0)
            window.finished()
        taken = ring.take(size)
        assert len(taken) == size and taken.storage_offset() % 64 == 0
        for other in under_way:
            start, end = taken.storage_offset(), taken.storage_offset() + len(taken)
            assert other.storage_offset() >= end or other.storage_offset() + len(other) <= start
        under_way.append(taken)


def test_a_range_of_a_matrix_is_three_rectangles_of_its_columns() -> None:
    part = TensorPart(name="w", shape=(6, 10), dim=1, start=4, end=8)
    piece = Piece(
        name="w", dtype="float32", start=16, end=46, offset=0
    )  # row 1 col 6 .. row 4 col 6
    found = [(r.source, r.target, r.rows, r.width) for r in rectangles(piece, part)]
    assert found == [(0, 6, 1, 2), (8, 8, 2, 4), (28, 16, 1, 2)]
    rows = TensorPart(name="w", shape=(6, 10), start=2, end=4)
    (one,) = rectangles(piece, rows)
    assert (one.source, one.target, one.rows, one.width) == (4, 0, 1, 20)


def test_parts_adjoin_in_the_order_of_the_engine() -> None:
    """So q, k and v of a layer are one matrix in the rank's arena."""
    specs = [ParameterSpec(name=n, shape=(rows, 64), dtype="bfloat16") for n, rows in QKV.items()]
    half = [
        TensorPart(name=n, shape=(rows, 64), start=rows // 2, end=rows)
        for n, rows in reversed(QKV.items())
    ]
    arena = parts_arena(make_arena(specs), half)
    assert [spec.name for spec in arena.specs] == ["v", "k", "q"]
    assert arena.num_bytes == sum(prod(part.part_shape) for part in half) * 2


QKV = {"q": 96, "k": 32, "v": 32}


def part(start: int, end: int, **changes: object) -> TensorPart:
    whole = TensorPart(name="w", shape=(10, 4), start=start, end=end)
    return msgspec.structs.replace(whole, **changes)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([part(0, 5), part(6, 10)], "rank 1 of the replica keeps 6:10 of dim 0, but up to 5"),
        ([part(0, 6), part(5, 10)], "rank 1 of the replica keeps 5:10 of dim 0, but up to 6"),
        ([part(0, 5), part(5, 9)], "keep 9 of the 10 of dim 0"),
        ([part(5, 5), part(0, 10)], "rank 0 of the replica keeps 5:5"),
        ([part(0, 10), part(0, 2, dim=1)], r"rank 1 .* \[10, 4\] along dim 1 where another has"),
        ([part(0, 10), part(0, 10, name="v")], "parameter v: rank 0 of the replica has nothing"),
    ],
)
def test_ranks_that_do_not_keep_all_of_a_tensor_are_refused(
    parts: list[TensorPart], message: str
) -> None:
    with pytest.raises(WeightSyncError, match=message):
        check_tiling([[one] for one in parts])


def test_ranks_may_keep_the_same_part() -> None:
    check_tiling([[part(0, 5)], [part(0, 5)], [part(5, 10)], [part(5, 10)]])
    check_tiling([[part(0, 10)], [part(0, 10)]])


def test_parts_of_what_is_not_sent_like_that_are_refused() -> None:
    arena = make_arena([ParameterSpec(name="w", shape=(10, 4), dtype="float32")])
    with pytest.raises(WeightSyncError, match=r"w is \[10, 4\] at the trainer but \[10, 5\]"):
        parts_arena(arena, [part(0, 5, shape=(10, 5))])
    with pytest.raises(WeightSyncError, match="does not send v"):
        parts_arena(arena, [part(0, 5, name="v")])


def test_plans_that_differ_in_anything_have_other_hashes() -> None:
    specs = [ParameterSpec(name=n, shape=(300, 130), dtype="float32") for n in "ab"]
    owned: list[dict[str, Range | None]] = [{"a": None, "b": None}] * 2

    def hash_of(specs: list[ParameterSpec], size: int, bucket_bytes: int) -> str:
        arena = make_arena(specs)
        return plan_hash(arena, make_plan(arena, owned[:size], bucket_bytes))

    one = hash_of(specs, 2, GRAIN)
    assert one == hash_of(list(specs), 2, GRAIN)
    others = [hash_of(specs[::-1], 2, GRAIN), hash_of(specs, 1, GRAIN), hash_of(specs, 2, 1 << 20)]
    assert len({one, *others}) == 4
    check_same_plan([one, one])
    with pytest.raises(WeightSyncError, match="trainer rank 1, 3 would send by another plan"):
        check_same_plan([one, others[0], one, others[1]])
