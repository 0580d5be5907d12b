"""Run by test_sync_mpi.py under mpiexec. The first ranks are the trainer's world, each other rank
is a generator replica of its own. Publishes three versions and compares every bit."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from mpi4py import MPI
from mpi_end import leave_together
from sync_setup import ToySource, assert_holds, checksum_of, wait_staged, weights

from llamarl_hpc.channels.messages import SyncMember
from llamarl_hpc.config.schema import Config, GeneratorConfig, WeightSyncConfig
from llamarl_hpc.models.int8 import quantised
from llamarl_hpc.placement import World
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.types import ParameterSpec
from llamarl_hpc.weight_sync.checksum import version_checksum
from llamarl_hpc.weight_sync.select import make_publisher, make_receiver


def sent(version: int, quantization: str) -> dict[str, torch.Tensor]:
    tensors = weights(version)
    return dict(quantised(tensors.items())) if quantization == "int8" else tensors


def main(run_path: str, transport: str, num_trainers: int, layout: str) -> None:
    everybody = MPI.COMM_WORLD
    is_trainer = everybody.rank < num_trainers
    comm = everybody.Split(0 if is_trainer else everybody.rank, everybody.rank)
    world = World(rank=comm.rank, size=comm.size, comm=comm)
    quantization = "int8" if layout == "quantised" else "none"
    config = Config(
        weight_sync=WeightSyncConfig(transport=transport, timeout_s=60, bucket_mb=1),
        generator=GeneratorConfig(quantization=quantization),
    )
    specs = [
        ParameterSpec(name=n, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
        for n, t in sent(0, quantization).items()
    ]
    run = RunDir(Path(run_path))
    members = [
        SyncMember(executor=f"generator.{number}")
        for number in range(everybody.size - num_trainers)
    ]
    if is_trainer:
        source = ToySource(comm.rank, comm.size, sharded=layout != "whole")
        publisher = make_publisher(run, config, world, source, "cpu")
        address = publisher.store_address
    address = everybody.bcast(address if is_trainer else None, root=0)
    executor = f"generator.{everybody.rank - num_trainers}"
    receiver = None if is_trainer else make_receiver(run, config, executor, world, "cpu", specs)
    for version in (1, 2, 3):
        tensors = sent(version, quantization)
        expected = version_checksum(specs, tensors)
        if receiver is None:
            source.tensors = weights(version)
            receipt = publisher.publish(version, 1, members)
            assert not world.is_leader or checksum_of(receipt) == expected
        else:
            receiver.start(version, 1, members, address)
            staged = wait_staged(receiver, 60.0)
            assert staged.checksum == expected
            assert_holds(staged, version, tensors)
            staged.release()
        everybody.Barrier()  # shared memory has two slots, and waits for nobody who is not there
    leave_together(everybody, receiver or publisher, f"ok {'network' if address else 'memory'}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
