"""Replicas of several ranks: every way by which a version gets to all of them, and a death."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sync_setup import Trainer, assert_holds, members, receiver, wait_staged
from test_sync_mpi import HERE, mpi_environment, mpi_run, mpiexec

from llamarl_hpc.channels.messages import SyncMember
from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.weight_sync.collective import node_window

WAYS = ["window", "parts", "sampled parts", "shared memory"]


@pytest.mark.mpi
def test_all_ranks_get_every_version_or_none_does(tmp_path: Path) -> None:
    result = mpi_run(4, HERE / "replica_program.py", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert [line for line in result.stdout.splitlines() if line.endswith("ok")] == [
        f"{way} ok" for way in WAYS
    ]


def test_a_window_that_does_not_fit_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stats:
        f_bavail, f_frsize = 512, 4096

    monkeypatch.setattr(node_window.os, "statvfs", lambda path: Stats)
    assert node_window.shortage(1 << 20) is None
    said = node_window.shortage(3 << 20)
    assert said is not None
    assert re.search(r"has 2 MiB free but .* needs 4 MiB; .* set weight_sync\.replica_memory", said)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("mode", "ranks"),
    [("window", (0,)), pytest.param("parts", (0, 1), marks=pytest.mark.long)],
)
def test_a_killed_rank_costs_its_replica_and_nobody_else(mode: str, ranks: tuple[int, ...]) -> None:
    trainer, other = Trainer(), receiver(1)
    names = set(os.listdir("/dev/shm"))
    replica = SyncMember(executor="generator.0", ranks=ranks)
    command = [mpiexec(), "-n", "2", sys.executable, str(HERE / "victim_program.py")]
    process = subprocess.Popen(
        [*command, trainer.store_address, mode],
        env=mpi_environment() | {"LLAMARL_EXECUTOR": "generator.0"},
        stdout=subprocess.PIPE,
        text=True,
    )
    trainer.publish(1, [replica])
    assert process.stdout is not None and process.stdout.readline()
    other.start(2, 2, [replica, *members(1)], trainer.store_address)
    trainer.publish(2, [replica, *members(1)], 2)
    try:
        staged = wait_staged(other, 60.0)  # it may have had everything by then
        assert_holds(staged, 2)
        staged.release()
    except WeightSyncError as error:
        assert "generator.0 rank" in str(error)
    assert "generator.0 rank" in trainer.wait_failure(60.0)
    assert process.wait(60) != 0
    start = time.monotonic()
    trainer.publish(3, members(1), 3)
    other.start(3, 3, members(1), trainer.store_address)
    assert_holds(wait_staged(other), 3)
    assert time.monotonic() - start < 20.0
    left = {name for name in set(os.listdir("/dev/shm")) - names if name.startswith("mpich")}
    deadline = time.monotonic() + 60.0  # other tests have names there, too, for a moment
    while left & set(os.listdir("/dev/shm")):
        assert time.monotonic() < deadline, "a dead rank's memory stays"
        time.sleep(0.1)
    other.close()
    trainer.close()
