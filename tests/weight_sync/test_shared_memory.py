"""Weight sync through shared memory: same bits everywhere, and nobody waits for the dead."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from sync_setup import (
    SPECS,
    ThreadWorld,
    ToySource,
    assert_holds,
    checksum_of,
    wait_staged,
    weights,
)

from llamarl_hpc.channels.messages import SyncMember
from llamarl_hpc.config.schema import WeightSyncConfig
from llamarl_hpc.errors import ConfigError, WeightSyncError
from llamarl_hpc.placement import World
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.weight_sync import segment
from llamarl_hpc.weight_sync.base import PublishReceipt
from llamarl_hpc.weight_sync.checksum import version_checksum
from llamarl_hpc.weight_sync.shared_memory import SharedMemoryPublisher
from llamarl_hpc.weight_sync.shared_memory_receiver import SharedMemoryReceiver

pytestmark = pytest.mark.skipif(not segment.SHM.is_dir(), reason="needs /dev/shm")

CONFIG = WeightSyncConfig(timeout_s=10.0, bucket_mb=1)
SHORT = WeightSyncConfig(timeout_s=0.5, bucket_mb=1)
MEMBERS = [
    SyncMember(executor="generator.0"),
    SyncMember(executor="generator.1"),
]
HERE = Path(__file__).parent


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create_at(tmp_path / "run")


class Trainer:
    """A publisher on each of `size` ranks; ranks are threads."""

    def __init__(
        self,
        run: RunDir,
        *,
        size: int = 1,
        sharded: bool = False,
        config: WeightSyncConfig = CONFIG,
    ) -> None:
        shared: dict[str, object] = {}
        self.sources = [ToySource(rank, size, sharded=sharded) for rank in range(size)]
        self.publishers: list[SharedMemoryPublisher] = [None] * size  # type: ignore[list-item]

        def make(rank: int) -> None:
            world = ThreadWorld(rank, size, shared) if size > 1 else World()
            self.publishers[rank] = SharedMemoryPublisher(
                run=run, config=config, world=world, source=self.sources[rank]
            )

        self.on_all_ranks(make)

    def on_all_ranks(self, call: object) -> None:
        threads = [
            threading.Thread(target=call, args=(rank,))  # type: ignore[arg-type]
            for rank in range(len(self.sources))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)

    def publish(self, version: int, members: list[SyncMember] = MEMBERS) -> PublishReceipt:
        results: list[PublishReceipt | Exception] = [None] * len(self.sources)  # type: ignore[list-item]

        def on_rank(rank: int) -> None:
            self.sources[rank].tensors = weights(version)
            try:
                results[rank] = self.publishers[rank].publish(version, 1, members)
            except Exception as error:
                results[rank] = error

        self.on_all_ranks(on_rank)
        first = results[0]
        if isinstance(first, Exception):
            raise first
        assert all(isinstance(o, PublishReceipt) and o.sent is None for o in results[1:])
        return first

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()


@pytest.fixture
def trainer(run: RunDir) -> Iterator[Trainer]:
    trainer = Trainer(run)
    yield trainer
    trainer.close()


def receiver(
    run: RunDir, number: int = 0, config: WeightSyncConfig = CONFIG
) -> SharedMemoryReceiver:
    return SharedMemoryReceiver(
        run=run, config=config, executor=f"generator.{number}", rank=0, specs=SPECS
    )


def shared_file(run: RunDir) -> Path:
    return Path(msgspec.json.decode((run.weights / "manifest.json").read_bytes())["path"])


def take(reader: SharedMemoryReceiver, version: int) -> str:
    """Receive, compare, release; returns the checksum."""
    reader.start(version, 1, MEMBERS, "")
    staged = wait_staged(reader)
    assert staged.version == version
    assert_holds(staged, version)
    staged.release()
    return staged.checksum


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


NAMED = (
    r"version 1 at generator\.0 rank 0: its checksum of embed\.weight, elements 0:66560 "
    r"\(bucket 0, sent by trainer rank 0\) is \w{16} but the trainer's is \w{16}"
)


def test_a_corrupted_byte_is_found(run: RunDir, trainer: Trainer) -> None:
    checksum_of(trainer.publish(1))
    with shared_file(run).open("r+b") as file:
        file.seek(segment.HEADER_BYTES + 123_456)
        byte = file.read(1)[0]
        file.seek(segment.HEADER_BYTES + 123_456)
        file.write(bytes([byte ^ 1]))
    reader = receiver(run)
    reader.start(1, 1, MEMBERS, "")
    with pytest.raises(WeightSyncError, match=NAMED):
        wait_staged(reader)
    other = receiver(run, 1)  # believes the first one
    other.start(1, 1, MEMBERS, "")
    with pytest.raises(WeightSyncError, match=r"at generator\.1 rank 0: its checksum of embed"):
        wait_staged(other)
    other.close()
    trainer.publish(2)
    take(reader, 2)
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


def test_a_version_that_never_comes_is_an_error_in_time(run: RunDir) -> None:
    reader = receiver(run, config=SHORT)
    start = time.monotonic()
    reader.start(1, 1, MEMBERS, "")
    with pytest.raises(WeightSyncError, match=r"did not publish version 1 within 0\.5 s"):
        wait_staged(reader)
    assert time.monotonic() - start < 5.0
    reader.close()


def test_other_tensors_than_the_generator_needs_are_refused(run: RunDir, trainer: Trainer) -> None:
    trainer.publish(1)
    for changed, message in [
        ([msgspec.structs.replace(SPECS[0], dtype="bfloat16"), *SPECS[1:]], "embed.weight is"),
        ([msgspec.structs.replace(SPECS[0], shape=(1, 2)), *SPECS[1:]], r"\[1, 2\]"),
        (SPECS[1:], "generator has no embed.weight"),
        ([*SPECS, msgspec.structs.replace(SPECS[0], name="x")], "does not send x"),
    ]:
        reader = SharedMemoryReceiver(
            run=run, config=CONFIG, executor="generator.0", rank=0, specs=changed
        )
        reader.start(1, 1, MEMBERS, "")
        with pytest.raises(WeightSyncError, match=message):
            wait_staged(reader)
        reader.close()


def test_too_little_shared_memory_is_a_config_error(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stats:
        f_bavail, f_frsize = 256, 4096

    monkeypatch.setattr(segment.os, "statvfs", lambda path: Stats)
    with pytest.raises(ConfigError, match=r"has 1 MiB free but .* need \d+ MiB.*collective"):
        SharedMemoryPublisher(
            run=run, config=CONFIG, world=World(), source=ToySource(0, 1, sharded=False)
        )


PROCESS = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_shared_memory as t
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
