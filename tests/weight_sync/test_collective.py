"""Weight sync by broadcasts over gloo: same bits everywhere, and what fails is named in time."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sync_setup import (
    SPECS,
    ThreadWorld,
    ToySource,
    Trainer,
    assert_holds,
    checksum_of,
    members,
    receiver,
    wait_staged,
    weights,
)

from llamarl_hpc.channels.messages import SyncMember
from llamarl_hpc.config.schema import WeightSyncConfig
from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.types import ParameterSpec
from llamarl_hpc.weight_sync.agreed_plan import agree_on_plan
from llamarl_hpc.weight_sync.checksum import version_checksum
from llamarl_hpc.weight_sync.collective import landing
from llamarl_hpc.weight_sync.collective import receiver as collective_receiver
from llamarl_hpc.weight_sync.collective.receiver import CollectiveReceiver
from llamarl_hpc.weight_sync.verification import Verify

SHORT = WeightSyncConfig(timeout_s=1.0, bucket_mb=1)
HERE = Path(__file__).parent


@pytest.fixture
def readers() -> Iterator[list[CollectiveReceiver]]:
    readers = [receiver(0), receiver(1)]
    yield readers
    for reader in readers:
        reader.close()


def take_all(
    trainer: Trainer,
    readers: list[CollectiveReceiver],
    version: int,
    to: list[SyncMember],
    epoch: int,
) -> None:
    for reader in readers:
        reader.start(version, epoch, to, trainer.store_address)
    for reader in readers:
        staged = wait_staged(reader)
        assert staged.version == version
        assert staged.checksum == version_checksum(SPECS, weights(version))
        assert_holds(staged, version)
        staged.release()


@pytest.mark.parametrize(("size", "sharded"), [(1, False), (2, False), (2, True), (3, True)])
def test_all_receivers_get_the_bits_of_every_version(
    readers: list[CollectiveReceiver], size: int, sharded: bool
) -> None:
    trainer = Trainer(size=size, sharded=sharded)
    for version in range(1, 4):
        receipt = trainer.publish(version, members(0, 1))
        take_all(trainer, readers, version, members(0, 1), 1)
        assert checksum_of(receipt) == version_checksum(SPECS, weights(version))
    trainer.publish(4, members(0, 1))  # waits for transfer 3, so its verdict is in
    assert trainer.publishers[0].failure == ""
    take_all(trainer, readers, 4, members(0, 1), 1)
    trainer.close()


def test_publishing_does_not_wait_for_receivers_but_the_next_does(
    readers: list[CollectiveReceiver],
) -> None:
    trainer = Trainer()
    start = time.monotonic()
    trainer.publish(1, members(0))
    assert time.monotonic() - start < 0.5
    timer = threading.Timer(1.0, readers[0].start, (1, 1, members(0), trainer.store_address))
    timer.start()
    trainer.publish(2, members(0))
    assert 0.9 < time.monotonic() - start < 5.0
    staged = wait_staged(readers[0])
    assert_holds(staged, 1)
    staged.release()
    take_all(trainer, readers[:1], 2, members(0), 1)
    trainer.close()


def test_receivers_may_begin_before_the_trainer(readers: list[CollectiveReceiver]) -> None:
    trainer = Trainer()
    for reader in readers:
        reader.start(1, 1, members(0, 1), trainer.store_address)
    time.sleep(0.2)
    assert readers[0].poll() is None
    trainer.publish(1, members(0, 1))
    for reader in readers:
        assert_holds(wait_staged(reader), 1)
    trainer.close()


def test_membership_changes_from_epoch_to_epoch(readers: list[CollectiveReceiver]) -> None:
    trainer = Trainer(size=2, sharded=True)
    for epoch, numbers in enumerate([(0,), (0, 1), (1,), (1, 0)], start=1):
        trainer.publish(epoch, members(*numbers), epoch)
        take_all(trainer, [readers[n] for n in numbers], epoch, members(*numbers), epoch)
    trainer.publish(9, [], 5)  # nobody to send to
    trainer.close()


def test_a_replica_restarted_under_its_name_is_not_mistaken_for_the_dead_one(
    readers: list[CollectiveReceiver],
) -> None:
    trainer = Trainer()
    trainer.publish(1, members(0, 1))
    take_all(trainer, readers, 1, members(0, 1), 1)
    readers[1].close()
    readers[1] = receiver(1)
    trainer.publish(1, members(0, 1))  # the same version and epoch once more
    take_all(trainer, readers, 1, members(0, 1), 1)
    trainer.close()


def test_a_receiver_that_never_comes_is_named_on_both_sides(
    readers: list[CollectiveReceiver],
) -> None:
    config = WeightSyncConfig(timeout_s=4.0, bucket_mb=1)  # enough for those who come
    trainer = Trainer(size=2, config=config)
    readers[0].start(1, 1, members(0, 1), trainer.store_address)
    trainer.publish(1, members(0, 1))
    with pytest.raises(WeightSyncError, match=r"generator\.1 rank 0 did not come to fetch it"):
        wait_staged(readers[0])
    assert "generator.1 rank 0 did not come" in trainer.wait_failure()
    trainer.publish(2, members(0), 2)
    take_all(trainer, readers[:1], 2, members(0), 2)
    trainer.close()


def test_a_trainer_that_never_publishes_is_an_error_in_time() -> None:
    trainer = Trainer()
    reader = receiver(0, SHORT)
    reader.start(1, 1, members(0), trainer.store_address)
    with pytest.raises(WeightSyncError, match=r"version 1 for generator\.0 rank 0 was not done"):
        wait_staged(reader)
    reader.close()
    trainer.close()


def test_a_trainer_that_is_gone_is_an_error_at_once() -> None:
    reader = receiver(0, SHORT)
    reader.start(1, 1, members(0), "127.0.0.1:9")
    with pytest.raises(WeightSyncError, match=r"generator\.0 rank 0 cannot reach the trainer"):
        wait_staged(reader)
    reader.close()


# bucket, parameter and sender of byte 98,765
NAMED = (
    r"generator\.0 rank 0: its checksum of embed\.weight, elements 0:66560 \(bucket 0, sent by "
    r"trainer rank 0\) is \w{16} but the trainer's is \w{16}"
)


def test_a_corrupted_byte_is_found_and_the_next_version_is_fine(
    readers: list[CollectiveReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    genuine = landing.piece_sum

    def corrupt(verify: Verify, version: int, *where: Any) -> int:
        if where[1].name == "embed.weight":
            where[-1][98_765] ^= 1  # the piece's bytes
        return genuine(verify, version, *where)

    monkeypatch.setattr(landing, "piece_sum", corrupt)
    readers[0].start(1, 1, members(0), trainer.store_address)
    trainer.publish(1, members(0))
    with pytest.raises(WeightSyncError, match=NAMED):
        wait_staged(readers[0])
    assert "checksum" in trainer.wait_failure()
    monkeypatch.setattr(landing, "piece_sum", genuine)
    trainer.publish(2, members(0))
    take_all(trainer, readers[:1], 2, members(0), 1)
    trainer.close()


def test_other_tensors_than_the_generator_needs_are_refused() -> None:
    trainer = Trainer()
    reader = CollectiveReceiver(
        config=SHORT,
        executor="generator.0",
        rank=0,
        device="cpu",
        address="127.0.0.1",
        specs=[msgspec.structs.replace(SPECS[0], shape=(1, 2)), *SPECS[1:]],
    )
    reader.start(1, 1, members(0), trainer.store_address)
    with pytest.raises(WeightSyncError, match=r"embed\.weight is float32 \[512, 130\] at the"):
        wait_staged(reader)
    reader.close()
    trainer.close()


def test_a_receiver_that_cuts_otherwise_than_the_trainer_gets_nothing(
    readers: list[CollectiveReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    monkeypatch.setattr(collective_receiver, "plan_hash", lambda *_: "0" * 16)
    readers[0].start(1, 1, members(0), trainer.store_address)
    trainer.publish(1, members(0))
    said = r"generator\.0 rank 0 would receive by plan 0{16} but the trainer sends by \w{16}"
    with pytest.raises(WeightSyncError, match=said):
        wait_staged(readers[0])
    assert trainer.wait_failure().endswith(trainer.publishers[0]._plan_hash)
    trainer.close()


class OtherSource(ToySource):
    """Lists its parameters in another order on rank 1."""

    def parameter_specs(self) -> list[ParameterSpec]:
        return SPECS[::-1] if self.rank else SPECS


def test_trainer_ranks_that_would_send_by_different_plans_are_named() -> None:
    shared: dict[str, object] = {}
    problems: list[str] = []

    def agree(rank: int) -> None:
        source = OtherSource(rank, 2, sharded=False)
        with pytest.raises(WeightSyncError, match="trainer rank 1 would send by another plan"):
            agree_on_plan(ThreadWorld(rank, 2, shared), source, 1 << 20)
        problems.append("named")

    threads = [threading.Thread(target=agree, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert problems == ["named", "named"]


PROCESS = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
import test_collective as t
from llamarl_hpc.weight_sync.collective import receiver as collective_receiver

genuine, calls = collective_receiver.broadcast, []

def dying(group, tensor):
    calls.append(1)
    if len(calls) == 2:
        print("dying", flush=True)
        time.sleep(float(sys.argv[3]))
        os.kill(os.getpid(), 9)
    return genuine(group, tensor)

collective_receiver.broadcast = dying
reader = t.receiver(1)
reader.start(1, 1, t.members(0, 1), sys.argv[2])
print("ready", flush=True)
time.sleep(120)
"""


@pytest.mark.parametrize("size", [1, 2])
def test_a_receiver_killed_in_the_middle_is_named_and_the_next_epoch_works(
    readers: list[CollectiveReceiver], size: int
) -> None:
    trainer = Trainer(size=size, sharded=size > 1)
    command = [sys.executable, "-c", PROCESS, str(HERE), trainer.store_address, "0.2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    readers[0].start(1, 1, members(0, 1), trainer.store_address)
    start = time.monotonic()
    trainer.publish(1, members(0, 1))
    assert process.stdout.readline() == b"dying\n"
    try:
        staged = wait_staged(readers[0])  # it may have had everything by then
        assert_holds(staged, 1)
        staged.release()
    except WeightSyncError as error:
        assert "generator.1 rank 0 fell silent" in str(error)
    assert process.wait() == -signal.SIGKILL
    assert "generator.1 rank 0 fell silent" in trainer.wait_failure()
    assert time.monotonic() - start < 12.0
    trainer.publish(2, members(0), 2)
    take_all(trainer, readers[:1], 2, members(0), 2)
    readers[1].close()
    readers[1] = receiver(1)
    trainer.publish(3, members(0, 1), 3)
    take_all(trainer, readers, 3, members(0, 1), 3)
    trainer.close()
