"""What the rollout store costs: each figure measured against a raw file, or in seconds, here.

`append_vs_raw_write` is the time a raw file takes for the same bytes (one write and one fsync for
each flush) over that of the writer (appended group by group, flushed as often, every file synced
and named). Each round measures the raw file before and after the writer and takes the mean; the
median of the rounds counts. The writer works beside its caller, as in a run: a flush is asked for
and the next groups are appended meanwhile; the clock stops when everything is on disk. Nothing is
compressed there, for a raw file is not. `writer_share_of_step` is of the writer as it is by
default: processor time until all segments are compressed and closed, over the time of a step.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from analysis.read_run import Run
from llamarl_hpc.config.schema import StorageConfig
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.storage.records import GroupRecord
from llamarl_hpc.storage.rollout_store import (
    RolloutReader,
    RolloutWriter,
    blocks,
    build,
    filters,
)
from llamarl_hpc.storage.rollout_store.encode import encode
from llamarl_hpc.storage.rollout_store.file import RolloutFile
from llamarl_hpc.storage.rollout_store.layout import Block
from llamarl_hpc.storage.rollout_store.names import segment_path
from llamarl_hpc.types import Completion, FinishReason, Prompt, Purpose, Status, VersionSpan

GROUP = 8  # completions of a prompt
SEGMENT_ROLLOUTS = 1000
_SHORT = 4  # tokens of a rollout of the run that is scanned
_LOOKS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What is written and read."""

    num_rollouts: int  # of a flush
    num_tokens: int  # of a rollout, mean
    num_flushes: int
    num_rounds: int
    num_segments: int
    step_s: float


def measure(folder: Path, shape: Shape) -> dict[str, Any]:
    """All figures, ready for JSON. Works in a new folder below `folder`, which it removes."""
    with tempfile.TemporaryDirectory(prefix=".bench-rollouts-", dir=folder) as name:
        figures: dict[str, Any] = {"load_average": os.getloadavg()[0]}  # who else was at work
        figures |= measure_append(Path(name), shape)
        figures |= measure_read(Path(name), shape)
        return figures | {"compression": measure_compression(shape)}


# ---------------------------------------------------------------- writing


def measure_append(folder: Path, shape: Shape) -> dict[str, Any]:
    """Throughput of the writer and of a raw file."""
    rng = np.random.default_rng(0)
    flushes = [
        [make_group(rng, flush * 1000 + g, shape.num_tokens) for g in range(_groups(shape))]
        for flush in range(shape.num_flushes)
    ]
    _, sizes = _append(folder / "warm", flushes)  # also tells how much a raw file must hold
    ratios, written, raw = [], [], []
    for _ in range(shape.num_rounds):
        before_s = _write_raw(folder / "raw", sizes)
        seconds, sizes = _append(folder / "store", flushes)
        raw_s = (before_s + _write_raw(folder / "raw", sizes)) / 2
        ratios.append(raw_s / seconds)
        written.append(sum(sizes) / seconds / 2**20)
        raw.append(sum(sizes) / raw_s / 2**20)
    cpu_s = _processor_s(folder / "store", flushes) / shape.num_flushes
    return {
        "append_vs_raw_write": statistics.median(ratios),
        "append_vs_raw_write_rounds": ratios,
        "append_mib_per_s": statistics.median(written),
        "raw_write_mib_per_s": statistics.median(raw),
        "flush_mib": sum(sizes) / shape.num_flushes / 2**20,
        "writer_processor_ms_per_flush": 1e3 * cpu_s,
        "writer_share_of_step": cpu_s / shape.step_s,
        "step_s": shape.step_s,
    }


def _groups(shape: Shape) -> int:
    return max(shape.num_rollouts // GROUP, 1)


def _append(folder: Path, flushes: list[list[GroupRecord]]) -> tuple[float, list[int]]:
    """Seconds until all is durable, bytes of each flush."""
    writer = _open_writer(folder, StorageConfig(compression="none"))
    start = time.perf_counter()
    _write_all(writer, flushes)
    seconds = time.perf_counter() - start
    writer.close()
    size = sum(path.stat().st_size for path in folder.glob("*.h5"))
    shutil.rmtree(folder)
    return seconds, [size // len(flushes)] * len(flushes)


def _processor_s(folder: Path, flushes: list[list[GroupRecord]]) -> float:
    """Seconds of processor time, of all threads, until the last segment is compressed."""
    writer = _open_writer(folder, StorageConfig())
    start = time.process_time()
    _write_all(writer, flushes)
    writer.close()
    seconds = time.process_time() - start
    shutil.rmtree(folder)
    return seconds


def _open_writer(folder: Path, config: StorageConfig) -> RolloutWriter:
    writer = RolloutWriter(
        folder, attempt=1, config=config, attributes={"run_id": "bench"}, reward_names=["exact"]
    )
    writer.flush()
    return writer


def _write_all(writer: RolloutWriter, flushes: list[list[GroupRecord]]) -> None:
    for records in flushes:
        for record in records:
            writer.append(record)
        writer.flush(wait=False)
    writer.flush()


def _write_raw(path: Path, sizes: list[int]) -> float:
    """Seconds for the same bytes in one file, synced after each part."""
    parts = [os.urandom(size) for size in sizes]
    start = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for part in parts:
            file.write(part)
            os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def make_group(rng: np.random.Generator, group_id: int, num_tokens: int) -> GroupRecord:
    """A trained group: lengths between half and one and a half of `num_tokens`."""
    lengths = rng.integers(num_tokens // 2, num_tokens * 3 // 2 + 1, GROUP).tolist()
    completions = [_completion(rng, length) for length in lengths]
    return GroupRecord(
        purpose=Purpose.TRAIN,
        group_id=group_id,
        attempt=1,
        issue=1,
        prompt=Prompt(
            prompt_id=f"{group_id:032x}",
            epoch=0,
            text="A train leaves at noon. " * 16,
            token_ids=np.arange(96, dtype=np.int32),
            columns={"question": "A train leaves at noon. " * 16, "answer": f"{group_id}"},
        ),
        status=Status.TRAINED,
        step=group_id // 32,
        generator=f"generator.{group_id % 4}",
        staleness=1,
        completions=completions,
        rewards={"exact": [float(i % 2) for i in range(GROUP)]},
        reward=[float(i % 2) for i in range(GROUP)],
        advantage=[i % 2 - 0.5 for i in range(GROUP)],
        logprobs_trainer=[c.logprobs for c in completions],
        t_issued=1e9,
        t_resolved=1e9 + 1,
    )


def _completion(rng: np.random.Generator, length: int) -> Completion:
    return Completion(
        token_ids=rng.integers(0, 50_000, length).astype(np.int32),
        logprobs=-rng.exponential(1.0, length).astype(np.float32),
        versions=[VersionSpan(0, length, 3)],
        finish_reason=FinishReason.STOP,
        text="step " * (length * 4 // 5),  # about four characters a token
        t_start=1e9,
        t_end=1e9 + 1,
    )


# ---------------------------------------------------------------- compression


def measure_compression(shape: Shape) -> dict[str, dict[str, float]]:
    """Of one closed segment in memory, by filter: its size as a share of the uncompressed one, MiB
    of columns per second made into a file and read from it. Without those that are not installed.
    """
    rng = np.random.default_rng(3)
    records = [make_group(rng, g, shape.num_tokens) for g in range(_groups(shape))]
    block = build.from_records(records, reward_names=["exact"], first_rollout_id=0)
    mib = blocks.num_bytes(block) / 2**20
    attributes = {"first_rollout_id": 0}
    whole = sum(len(part) for part in encode(block, attributes, compression="none"))
    return {
        compression: _measure_filter(block, attributes, compression, mib, whole)
        for compression in ("checksum", "gzip", "lzf", *filters.PLUGINS)
        if compression not in filters.PLUGINS or find_spec("hdf5plugin") is not None
    }


def _measure_filter(
    block: Block, attributes: dict[str, int], compression: str, mib: float, whole: int
) -> dict[str, float]:
    start = time.perf_counter()
    image = b"".join(encode(block, attributes, compression=compression))
    made_s = time.perf_counter() - start
    file = RolloutFile(image, compression)
    start = time.perf_counter()
    file.block()
    read_s = time.perf_counter() - start
    file.close()
    return {
        "size": len(image) / whole,
        "write_mib_per_s": mib / made_s,
        "read_mib_per_s": mib / read_s,
    }


# ---------------------------------------------------------------- reading


def measure_read(folder: Path, shape: Shape) -> dict[str, Any]:
    """Opening a long run and reading one column; one rollout; memory of a scan."""
    run = RunDir.create_at(folder / "run")
    run.config.write_text("{}\n")
    size = write_segments(run.rollouts, shape.num_segments)
    column_s = []
    for _ in range(4):  # the first warms the page cache
        start = time.perf_counter()
        reader = RolloutReader(run.rollouts)
        rows = len(reader.column("rollouts/reward"))
        column_s.append(time.perf_counter() - start)
        reader.close()
    by_id = _look_up(Run(run), shape.num_segments)
    return {
        "num_segments": shape.num_segments,
        "num_rollouts": rows,
        "store_mib": size / 2**20,
        "open_and_read_column_s": statistics.median(column_s[1:]),
        "rollout_by_id_ms": 1e3 * statistics.median(by_id),
        "rollout_by_id_max_ms": 1e3 * max(by_id),
        **_scan(run.rollouts),
    }


def write_segments(folder: Path, num_segments: int) -> int:
    """Closed segments of 1,000 short rollouts each, without syncing; their bytes together."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    records = [make_group(rng, g, _SHORT) for g in range(SEGMENT_ROLLOUTS // GROUP)]
    block = build.from_records(records, reward_names=[], first_rollout_id=0)
    rows, size = len(block["rollouts/rollout_id"]), 0
    for number in range(num_segments):
        first = (1 << 32) + number * rows
        shifted = block | {"rollouts/rollout_id": first + block["rollouts/rollout_id"]}
        attributes = {
            "attempt": 1,
            "segment": number,
            "part": -1,
            "first_rollout_id": first,
            "num_rollouts": rows,
        }
        image = encode(shifted, attributes, compression="gzip")
        size += segment_path(folder, number).write_bytes(b"".join(image))
    return size


def _look_up(run: Run, num_segments: int) -> list[float]:
    """Seconds for one rollout by its id, of segments at random."""
    rng = np.random.default_rng(2)
    seconds = []
    num_rollouts = run.store.num_rows("rollouts")
    for number in rng.integers(0, num_rollouts, _LOOKS).tolist():
        start = time.perf_counter()
        run.rollout((1 << 32) + number)
        seconds.append(time.perf_counter() - start)
    return seconds


def _scan(folder: Path) -> dict[str, float]:
    """MiB that are read when all tokens are looked at file by file, and by how many this process
    grows meanwhile."""
    import psutil

    process, reader = psutil.Process(), RolloutReader(folder)
    before = peak = process.memory_info().rss
    read = 0
    for _, file in reader.scan():
        read += file.read("tokens/id").nbytes + file.read("tokens/logprob_behaviour").nbytes
        peak = max(peak, process.memory_info().rss)
    reader.close()
    return {"scan_mib": read / 2**20, "scan_memory_mib": (peak - before) / 2**20}
