"""Run by test_sync_mpi.py under mpiexec: two trainer ranks with a ZeRO-3 layout, one replica of
two ranks that keep half of every tensor each.

Each rank may allocate a copy of its half and SLACK, and not a byte more: the kernel refuses it
(RLIMIT_DATA). A rank that gathers the model, or only the other's half, dies of it.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch
from mpi4py import MPI
from mpi_end import leave_together
from sync_setup import wait_staged

from llamarl_hpc.channels.messages import SyncMember
from llamarl_hpc.config.schema import Config, WeightSyncConfig
from llamarl_hpc.placement import World
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.types import ParameterSpec, TensorPart
from llamarl_hpc.weight_sync.bench.weights import MadeUpWeights
from llamarl_hpc.weight_sync.select import make_publisher, make_receiver

MIB = 1 << 20
SPECS = [
    ParameterSpec(name=f"w{k}", shape=(1024, 16 * MIB // 4096), dtype="float32") for k in range(16)
]
HALF = 128 * MIB
SLACK = 96 * MIB  # stacks of threads (8 MiB each), buffers of gloo; buckets have 4 MiB
NOT_HELD = 77  # exit code: this kernel does not hold the limit


def forbid_more_than(num_bytes: int) -> None:
    """From now on; exits where that has no effect."""
    status = Path("/proc/self/status").read_text()
    held = int(status.split("VmData:")[1].split()[0]) << 10
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held + num_bytes, hard))
    try:
        torch.empty(num_bytes + MIB, dtype=torch.uint8)
    except RuntimeError:
        return
    MPI.COMM_WORLD.Abort(NOT_HELD)


def half(rank: int) -> list[TensorPart]:
    """Rows of one tensor, columns of the next."""
    return [
        TensorPart(
            name=spec.name,
            shape=spec.shape,
            dim=k % 2,
            start=rank * spec.shape[k % 2] // 2,
            end=(rank + 1) * spec.shape[k % 2] // 2,
        )
        for k, spec in enumerate(SPECS)
    ]


def main(run_path: str) -> None:
    everybody = MPI.COMM_WORLD
    is_trainer = everybody.rank < 2
    comm = everybody.Split(0 if is_trainer else 1, everybody.rank)
    world = World(rank=comm.rank, size=comm.size, comm=comm)
    block = WeightSyncConfig(
        transport="collective", timeout_s=60, bucket_mb=4, replica_memory="parts"
    )
    config, run = Config(weight_sync=block), RunDir(Path(run_path))
    members = [SyncMember(executor="generator.0", ranks=(0, 1))]
    if is_trainer:
        source = MadeUpWeights(SPECS, comm.rank, 2, sharded=True)
        forbid_more_than(HALF + SLACK)
        publisher = make_publisher(run, config, world, source, "cpu")
    address = everybody.bcast(publisher.store_address if is_trainer else None, root=0)
    receiver = None
    if not is_trainer:
        parts = half(comm.rank)
        receiver = make_receiver(run, config, "generator.0", world, "cpu", SPECS, parts)
        forbid_more_than(HALF + SLACK)
    for version in (1, 2):
        if receiver is None:
            receipt = publisher.publish(version, 1, members)
            assert receipt.sent is None or receipt.sent.result(60).share == 1.0
        else:
            receiver.start(version, 1, members, address)
            staged = wait_staged(receiver, 60.0)
            assert staged.checksum
            assert sum(tensor.nbytes for _, tensor in staged.tensors()) == HALF
            staged.release()
    leave_together(everybody, receiver or publisher, "ok")


if __name__ == "__main__":
    main(sys.argv[1])
