"""Run by test_replica.py under mpiexec: one trainer rank, and a replica of three ranks of which
two share a "node". Three versions by every way; the second is damaged at one rank."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

from mpi4py import MPI
from replica_setup import ToyEngine, switch, toy_parts
from sync_setup import SPECS, ToySource, weights

from llamarl_hpc.channels.messages import SyncMember
from llamarl_hpc.config.schema import Config, WeightSyncConfig
from llamarl_hpc.placement import World
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.weight_sync.collective import landing
from llamarl_hpc.weight_sync.select import make_publisher, make_receiver

WAYS: dict[str, dict[str, Any]] = {
    "window": {"transport": "collective", "replica_memory": "auto", "delta": "auto"},
    "parts": {"transport": "collective", "replica_memory": "parts"},
    "sampled parts": {"transport": "collective", "replica_memory": "parts", "verify": "sampled"},
    "shared memory": {"transport": "shared_memory"},
}
RANKS = {"window": (0, 2), "parts": (0, 1, 2), "sampled parts": (0, 1, 2), "shared memory": (0, 2)}
DAMAGED = {"window": 0, "parts": 1}  # executor rank at which version 2 is damaged
REFUSED = {"window": [0, 1], "parts": [1]}  # that must notice; the trainer may stop others


def replica_world(comm: Any) -> World:
    node = comm.Split(comm.rank // 2, comm.rank)
    return World(
        rank=comm.rank,
        size=comm.size,
        local_rank=node.rank,
        local_size=node.size,
        comm=comm,
        node=node,
    )


def damage(way: str, world: World, version: int) -> None:
    """Flip a bit of the largest tensor before it is summed."""
    genuine_piece, genuine_bucket = landing.piece_sum, landing.bucket_sums

    def piece(*where: Any) -> int:
        where[-1][-1] ^= 1
        return genuine_piece(*where)

    def bucket(*where: Any) -> list[int]:
        where[-1][: where[-2].num_bytes][-1] ^= 1
        return genuine_bucket(*where)

    if version == 2 and DAMAGED.get(way) == world.rank:
        landing.piece_sum, landing.bucket_sums = piece, bucket
    else:
        landing.piece_sum, landing.bucket_sums = GENUINE


GENUINE = landing.piece_sum, landing.bucket_sums


def train(everybody: Any, run: RunDir, config: Config, way: str) -> None:
    source = ToySource(0, 1, sharded=False)
    publisher = make_publisher(run, config, World(), source, "cpu")
    everybody.bcast(publisher.store_address, root=0)
    members = [SyncMember(executor="generator.0", ranks=RANKS[way])]
    for version in (1, 2, 3):
        source.tensors = weights(version)
        publisher.publish(version, version, members)
        everybody.Barrier()  # as the controller paces it
    publisher.close()


def generate(everybody: Any, run: RunDir, config: Config, way: str, world: World) -> None:
    address = everybody.bcast(None, root=0)
    parts = toy_parts(world.rank, world.size)
    engine = ToyEngine(parts)
    receiver = make_receiver(run, config, "generator.0", world, "cpu", SPECS, parts)
    assert receiver.ranks == RANKS[way]
    members = [SyncMember(executor="generator.0", ranks=receiver.ranks)]
    for version in (1, 2, 3):
        damage(way, world, version)
        receiver.start(version, version, members, address)
        problems = switch(world, receiver, engine)
        if version == 2 and way in DAMAGED:
            assert all("checksum" in problems[rank] for rank in REFUSED[way]), problems
            assert engine.version == 1
        else:
            assert not any(problems), problems
            engine.assert_holds(version)
            assert engine.came_whole == (way in ("window", "shared memory"))
        everybody.Barrier()
    receiver.close()


def main(folder: Path) -> None:
    everybody = MPI.COMM_WORLD
    is_trainer = everybody.rank == 0
    comm = everybody.Split(int(not is_trainer), everybody.rank)
    world = None if is_trainer else replica_world(comm)
    for way, keys in WAYS.items():
        config = Config(weight_sync=WeightSyncConfig(timeout_s=60, bucket_mb=1, **keys))
        run = RunDir(folder / way)
        if is_trainer:
            RunDir.create_at(run.path)
        everybody.Barrier()
        if world is None:
            train(everybody, run, config, way)
        else:
            generate(everybody, run, config, way, world)
        everybody.Barrier()
        if is_trainer:
            print(f"{way} ok", flush=True)
    World(rank=everybody.rank, size=everybody.size, comm=everybody).leave()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
        MPI.COMM_WORLD.Abort(1)
