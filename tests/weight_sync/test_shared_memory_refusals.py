"""Weight sync through shared memory: what is damaged, late, other, or too large is refused."""

from __future__ import annotations

import time

import msgspec
import pytest
from shared_memory_setup import CONFIG, MEMBERS, SHORT, Trainer, receiver, shared_file, take
from sync_setup import SPECS, ToySource, checksum_of, wait_staged

from llamarl_hpc.errors import ConfigError, WeightSyncError
from llamarl_hpc.placement import World
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.weight_sync.shared_memory import segment
from llamarl_hpc.weight_sync.shared_memory.manifest import read_manifest, write_manifest
from llamarl_hpc.weight_sync.shared_memory.publisher import SharedMemoryPublisher
from llamarl_hpc.weight_sync.shared_memory.receiver import SharedMemoryReceiver

pytestmark = pytest.mark.skipif(not segment.SHM.is_dir(), reason="needs /dev/shm")

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


def test_a_reader_that_cuts_otherwise_than_the_trainer_refuses(
    run: RunDir, trainer: Trainer
) -> None:
    trainer.publish(1)
    manifest = read_manifest(run)
    assert manifest is not None
    write_manifest(run, msgspec.structs.replace(manifest, buckets=manifest.buckets[1:]))
    reader = receiver(run)
    reader.start(1, 1, MEMBERS, "")
    with pytest.raises(WeightSyncError, match=r"would read by plan \w{16} but .* by \w{16}"):
        wait_staged(reader)
    reader.close()
    write_manifest(run, manifest)
