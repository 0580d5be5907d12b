"""The plan that all trainer ranks send by, made when a publisher is."""

from __future__ import annotations

from llamarl_hpc.placement import World
from llamarl_hpc.weight_sync.base import WeightSource
from llamarl_hpc.weight_sync.plan import (
    Arena,
    Bucket,
    check_same_plan,
    make_arena,
    make_plan,
    plan_hash,
)


def agree_on_plan(
    world: World, source: WeightSource, bucket_bytes: int
) -> tuple[Arena, list[Bucket], str]:
    """Arena, buckets, and their hash. A collective call; raises WeightSyncError on all ranks where
    one of them has come to another plan."""
    specs = source.parameter_specs()
    arena = make_arena(specs)
    owned = world.allgather({spec.name: source.owned_range(spec.name) for spec in specs})
    plan = make_plan(arena, owned, bucket_bytes)
    found = plan_hash(arena, plan)
    check_same_plan(world.allgather(found))
    return arena, plan, found
