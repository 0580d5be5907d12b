"""Weight sync through shared memory: nobody waits for the dead, nor reads what they left."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from shared_memory_setup import MEMBERS, SHORT, Trainer, receiver, shared_file, take
from sync_setup import assert_holds, wait_staged

from llamarl_hpc.config.schema import WeightSyncConfig
from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.weight_sync.shared_memory import segment

pytestmark = pytest.mark.skipif(not segment.SHM.is_dir(), reason="needs /dev/shm")

HERE = Path(__file__).parent

PROCESS = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import shared_memory_setup as t
from sync_setup import wait_staged
run = t.RunDir(Path(sys.argv[2]))
if sys.argv[3] == "read":
    reader = t.receiver(run, 1)
    reader.start(int(sys.argv[4]), 1, t.MEMBERS, "")
    wait_staged(reader)
else:
    trainer = t.Trainer(run)
    trainer.publish(1)
print("ready", flush=True)
time.sleep(120)
"""


def start_process(run: RunDir, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PROCESS, str(HERE), str(run.path), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    return process


def test_a_killed_reader_holds_nothing_up(run: RunDir) -> None:
    trainer = Trainer(run, config=SHORT)
    trainer.publish(1)
    process = start_process(run, "read", "1")
    trainer.publish(2)
    with pytest.raises(WeightSyncError, match=r"generator\.1 rank 0"):
        trainer.publish(3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    trainer.publish(3)
    reader = receiver(run, 1)
    take(reader, 3)
    reader.close()
    trainer.close()


def test_what_a_killed_trainer_left_is_not_read_and_is_removed(run: RunDir) -> None:
    process = start_process(run, "write")
    reader = receiver(run, config=WeightSyncConfig(timeout_s=2.0))
    take(reader, 1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = shared_file(run)
    assert left.exists()
    reader.start(2, 1, MEMBERS, "")
    with pytest.raises(WeightSyncError, match="the trainer is gone"):
        wait_staged(reader)
    reader.close()

    late = receiver(run)
    late.start(1, 1, MEMBERS, "")  # the manifest still names the dead trainer's file
    time.sleep(0.1)
    assert late.poll() is None
    trainer = Trainer(run)
    assert not left.exists()
    trainer.publish(1)
    assert_holds(wait_staged(late), 1)
    late.close()
    trainer.close()
