"""Run by test_replica.py under mpiexec, as generator.0: takes version 1; rank 1 is killed while
version 2 arrives. Arguments: the trainer's store, window or parts."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from replica_setup import ToyEngine, switch, toy_parts
from sync_setup import SPECS, members

from llamarl_hpc.config.schema import Config, WeightSyncConfig
from llamarl_hpc.placement import detect
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.weight_sync.collective import receiver as collective_receiver
from llamarl_hpc.weight_sync.select import make_receiver


def main(address: str, mode: str) -> None:
    world = detect()
    block = WeightSyncConfig(transport="collective", timeout_s=60, bucket_mb=1, replica_memory=mode)
    parts = toy_parts(world.rank, world.size)
    engine = ToyEngine(parts)
    receiver = make_receiver(
        RunDir(Path()), Config(weight_sync=block), "generator.0", world, "cpu", SPECS, parts
    )
    receiver.start(1, 1, members(0), address)
    assert not any(switch(world, receiver, engine))
    engine.assert_holds(1)
    if world.is_leader:
        print("took version 1", flush=True)
        slow_down()
    receiver.start(2, 2, members(0), address)
    if world.rank == 1:
        time.sleep(1.0)  # amid the transfer, which the leader has slowed down
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(120)


def slow_down() -> None:
    """From now on the first broadcast of a version takes for ever."""

    def never(group: Any, tensor: Any) -> Any:
        time.sleep(120)

    collective_receiver.broadcast = never


if __name__ == "__main__":
    main(*sys.argv[1:])
