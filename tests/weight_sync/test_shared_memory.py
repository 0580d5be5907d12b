"""Weight sync through shared memory: same bits everywhere, and who waits for whom."""

from __future__ import annotations

import threading
import time

import pytest
from shared_memory_setup import MEMBERS, SHORT, Trainer, receiver, shared_file, take
from sync_setup import SPECS, assert_holds, checksum_of, wait_staged, weights

from llamarl_hpc.channels.messages import SyncMember
from llamarl_hpc.config.schema import WeightSyncConfig
from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.weight_sync.checksum import version_checksum
from llamarl_hpc.weight_sync.shared_memory import segment

pytestmark = pytest.mark.skipif(not segment.SHM.is_dir(), reason="needs /dev/shm")


@pytest.mark.parametrize(("size", "sharded"), [(1, False), (2, False), (2, True), (3, True)])
def test_all_readers_get_the_bits_of_every_version(run: RunDir, size: int, sharded: bool) -> None:
    trainer = Trainer(run, size=size, sharded=sharded)
    readers = [receiver(run, number) for number in range(2)]
    for version in range(1, 6):
        receipt = trainer.publish(version)
        expected = version_checksum(SPECS, weights(version))
        assert receipt.version == version and checksum_of(receipt) == expected
        assert receipt.num_bytes >= sum(t.nbytes for t in weights(version).values())
        assert [take(reader, version) for reader in readers] == [expected, expected]
    for reader in readers:
        reader.close()
    assert shared_file(run).stat().st_mode & 0o777 == 0o600
    trainer.close()
    assert not shared_file(run).exists()


def test_a_fetch_may_begin_before_the_version_is_there(run: RunDir) -> None:
    reader = receiver(run)
    reader.start(1, 1, MEMBERS, "")
    time.sleep(0.1)
    assert reader.poll() is None
    trainer = Trainer(run)
    trainer.publish(1)
    staged = wait_staged(reader)
    assert_holds(staged, 1)
    reader.close()
    trainer.close()


def test_publishing_does_not_wait_for_readers_of_the_version_before(
    run: RunDir, trainer: Trainer
) -> None:
    slow = receiver(run)
    trainer.publish(1)
    slow.start(1, 1, MEMBERS, "")
    staged = wait_staged(slow)
    start = time.monotonic()
    trainer.publish(2)
    assert time.monotonic() - start < 1.0
    assert_holds(staged, 1)  # untouched
    staged.release()
    take(slow, 2)
    slow.close()


def test_the_version_after_next_waits_for_the_slow_reader_and_names_it(run: RunDir) -> None:
    trainer = Trainer(run, config=SHORT)
    slow = receiver(run, 1)
    trainer.publish(1)
    slow.start(1, 1, MEMBERS, "")
    staged = wait_staged(slow)
    trainer.publish(2)
    with pytest.raises(WeightSyncError, match=r"version 1 .* within 0\.5 s by generator\.1 rank 0"):
        trainer.publish(3)
    assert_holds(staged, 1)
    threading.Timer(0.2, staged.release).start()
    trainer.publish(3)
    take(slow, 3)
    slow.close()
    trainer.close()


def test_a_member_that_has_yet_to_read_is_waited_for_while_it_lives(run: RunDir) -> None:
    trainer = Trainer(run, config=SHORT)
    reader = receiver(run, 0)
    trainer.publish(1)
    take(reader, 1)
    trainer.publish(2)  # reader does not take it
    trainer.publish(3)
    with pytest.raises(WeightSyncError, match=r"version 2 .* by generator\.0 rank 0"):
        trainer.publish(4)
    others = [SyncMember(executor="generator.1")]
    trainer.publish(4, others)  # generator.0 is no member any more
    reader.close()
    trainer.publish(5)
    trainer.publish(6)
    trainer.close()


def test_a_late_reader_gets_the_newest_version_and_learns_what_is_gone(
    run: RunDir, trainer: Trainer
) -> None:
    for version in (1, 2, 3):
        trainer.publish(version)
    late = receiver(run)
    take(late, 3)
    late.start(1, 1, MEMBERS, "")
    with pytest.raises(
        WeightSyncError, match=r"version 1 came too late to generator\.0 rank 0.* 3"
    ):
        wait_staged(late)
    late.start(2, 1, MEMBERS, "")  # still in the other slot
    staged = wait_staged(late)
    assert_holds(staged, 2)
    late.close()


def test_a_second_fetch_waits_until_the_first_version_is_released(
    run: RunDir, trainer: Trainer
) -> None:
    reader = receiver(run)
    trainer.publish(1)
    reader.start(1, 1, MEMBERS, "")
    reader.start(2, 1, MEMBERS, "")
    first = wait_staged(reader)
    trainer.publish(2)
    time.sleep(0.1)
    assert reader.poll() is None
    first.release()
    second = wait_staged(reader)
    assert_holds(second, 2)
    reader.close()


def test_what_a_reader_writes_reaches_nobody_else(run: RunDir, trainer: Trainer) -> None:
    trainer.publish(1)
    vandal, reader = receiver(run, 0), receiver(run, 1)
    vandal.start(1, 1, MEMBERS, "")
    staged = wait_staged(vandal)
    for _, tensor in staged.tensors():
        tensor.zero_()
    take(reader, 1)
    vandal.close()
    reader.close()


def test_versions_and_readers_at_full_speed_never_mix(run: RunDir, trainer: Trainer) -> None:
    """Stress: readers take what they can get while the trainer publishes without pause."""
    config = WeightSyncConfig(timeout_s=10.0, verify="off")
    taken = [0, 0]

    def read(number: int) -> None:
        reader = receiver(run, number, config)
        for version in range(1, 31):
            reader.start(version, 1, MEMBERS, "")
            staged = wait_staged(reader)
            held = dict(staged.tensors())
            assert version_checksum(SPECS, held) == staged.checksum
            staged.release()
            taken[number] += 1
        reader.close()

    threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)  # both have registered, so that they are waited for
    for version in range(1, 31):
        trainer.publish(version)
    for thread in threads:
        thread.join(30)
    assert taken == [30, 30]
