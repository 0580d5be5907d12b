"""The rollout store under kill -9, and read while it is written. Long: for a quiet hour.

    python experiments/benchmarks/rollout_store_endurance.py crash --kills 200
    python experiments/benchmarks/rollout_store_endurance.py read --seconds 600

`crash` starts a writer at full speed, kills it at a random moment, and checks everything the folder
holds: every file opens in plain h5py, every row is whole, the groups of each attempt are those
issued, without gaps, nothing that was said to be on disk is missing, and no more is there than had
been asked for: one flush, or four that are on their way together. The next writer is the next
attempt in the same folder, as after a resume; every 20 kills the folder is begun anew.

`read` opens the store again and again while a writer works: no error, and never a row fewer.

Exit code 1 and a sentence when something does not hold. The tests run the short versions.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from llamarl_hpc.cli.bench_rollouts import GROUP, make_group
from llamarl_hpc.config.schema import StorageConfig
from llamarl_hpc.storage.records import GroupRecord
from llamarl_hpc.storage.rollout_store import RolloutReader, RolloutWriter
from llamarl_hpc.storage.rollout_store import segment as segments

FLUSH = 3  # groups
SMALL = (FLUSH, 4)  # groups of a flush and flushes of a segment: it is closed all the time
LARGE = (16, 64)
AHEAD = (1, 4)  # flushes that are asked for before the last of them is waited for
DISTINCT = 64  # groups that are written again and again
KILLS_PER_FOLDER = 20


class Broken(Exception):
    """A promise of the store that did not hold."""


# ---------------------------------------------------------------- the writer that is killed


def write(folder: Path, attempt: int, compression: str, flush: int, parts: int, ahead: int) -> None:
    """Append for ever; say how many groups are durable after each flush that is waited for."""
    segments.MAX_PARTS = parts
    segment = GROUP * flush * parts
    config = StorageConfig.model_validate({"compression": compression, "segment_rollouts": segment})
    groups = [_group(number) for number in range(DISTINCT)]
    writer = RolloutWriter(
        folder, attempt=attempt, config=config, attributes={"run_id": "r"}, reward_names=["exact"]
    )
    print("ready", flush=True)
    number = 0
    while True:
        for _ in range(ahead):
            for _ in range(flush):
                fields = {"group_id": number, "attempt": attempt}
                writer.append(_replaced(groups[number % DISTINCT], fields))
                number += 1
            writer.flush(60, wait=False)
        writer.flush(60)
        print(number, flush=True)


def _group(number: int) -> GroupRecord:
    """What is written as this group, but for its number and attempt."""
    return make_group(np.random.default_rng(number % DISTINCT), number % DISTINCT, 40)


def _replaced(record: Any, fields: dict[str, int]) -> Any:
    import msgspec

    return msgspec.structs.replace(record, **fields)


@contextmanager
def running_writer(
    folder: Path, attempt: int, compression: str, flush: int, parts: int, ahead: int = 1
) -> Iterator[subprocess.Popen[str]]:
    numbers = map(str, (flush, parts, ahead))
    words = [sys.executable, __file__, "write", str(folder), str(attempt), compression, *numbers]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise Broken(f"the writer of attempt {attempt} did not start")
        yield process
    finally:
        process.kill()
        process.wait()


# ---------------------------------------------------------------- crash


def crash(kills: int, seed: int) -> dict[str, Any]:
    """Figures of `kills` kills. Raises Broken."""
    rng = random.Random(seed)
    lost, flushed_total, files = [], 0, 0
    done = 0
    while done < kills:
        with tempfile.TemporaryDirectory(prefix="rollouts-") as name:
            folder = Path(name)
            flushed: dict[int, tuple[int, int]] = {}
            for attempt in range(1, min(KILLS_PER_FOLDER, kills - done) + 1):
                ahead = rng.choice(AHEAD)
                said = _kill_one(folder, attempt, ahead, rng)
                flushed[attempt] = said, said + ahead * FLUSH
                stored = check(folder, flushed)
                lost.append(stored[attempt] - said)
                done += 1
            next_attempt = RolloutWriter(  # closes what the killed ones left open
                folder,
                attempt=len(flushed) + 1,
                config=StorageConfig(),
                attributes={},
                reward_names=[],
            )
            next_attempt.close()
            check(folder, flushed)
            if list(folder.glob("*.open")):
                raise Broken("a later attempt left a killed one's segment open")
            flushed_total += sum(said for said, _ in flushed.values())
            files += len(list(folder.glob("*.h5")))
    return {
        "kills": kills,
        "groups_flushed": flushed_total,
        "groups_beyond_the_last_flush": max(lost),
        "groups_lost_after_flush": max(0, -min(lost)),
        "segments": files,
    }


def _kill_one(folder: Path, attempt: int, ahead: int, rng: random.Random) -> int:
    """Kill a writer at a random moment; how many groups it had said were durable."""
    compression = rng.choice(["gzip", "none"])
    with running_writer(folder, attempt, compression, *SMALL, ahead) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(rng.randint(0, 20))]
        time.sleep(rng.uniform(0.0, 0.05))
        process.kill()
        lines += process.stdout.read().split()
    return int(lines[-1]) if lines else 0


def check(folder: Path, flushed: dict[int, tuple[int, int]]) -> dict[int, int]:
    """Groups found by attempt. Raises Broken unless all is there and whole.

    `flushed`: how many it had said were durable, and had asked for.
    """
    for path in folder.rglob("*.h5"):
        h5py.File(path, "r").close()  # as anybody would open it
    reader = RolloutReader(folder)
    if reader.problems:
        raise Broken(f"after a kill: {reader.problems}")
    groups = reader.columns("groups", ["attempt", "group_id"])
    found: dict[int, int] = {}
    for attempt, (least, most) in flushed.items():
        ids = groups["group_id"][groups["attempt"] == attempt]
        if not np.array_equal(ids, np.arange(len(ids))):
            raise Broken(f"attempt {attempt} has gaps, or groups twice: {ids.tolist()}")
        if not least <= len(ids) <= most:
            raise Broken(f"attempt {attempt}: {len(ids)} groups, not {least} to {most}")
        found[attempt] = len(ids)
    for name, file in reader.scan():
        if wrong := file.checked_block()[1]:
            raise Broken(f"{name}: {wrong}")
    reader.close()
    return found


# ---------------------------------------------------------------- read while writing


def read(seconds: float) -> dict[str, Any]:
    """Figures of reading beside a writer at full speed. Raises Broken."""
    seen, took = 0, list[float]()
    with (
        tempfile.TemporaryDirectory(prefix="rollouts-") as name,
        running_writer(Path(name), 1, "gzip", *LARGE) as process,
    ):
        # The writer must not wait for us to read what it says.
        threading.Thread(target=deque, args=(process.stdout, 0), daemon=True).start()
        kept = RolloutReader(Path(name))
        start = time.monotonic()
        while time.monotonic() < start + seconds:
            begun = time.monotonic()
            if len(took) % 2:
                kept.refresh()
            reader = kept if len(took) % 2 else RolloutReader(Path(name))
            seen = _look(reader, seen)
            took.append(time.monotonic() - begun)
        elapsed = time.monotonic() - start
        if process.poll() is not None:
            raise Broken("the writer ended by itself")
        files = len(kept.file_names)
    return {
        "seconds": elapsed,
        "looks": len(took),
        "groups": seen,
        "rollouts_written_per_s": GROUP * seen / elapsed,
        "rollouts_read_per_s": GROUP * seen / took[-1],  # by the last look, at whole columns
        "slowest_look_s": max(took),
        "files": files,
    }


def _look(reader: RolloutReader, seen: int) -> int:
    """Groups there are. What there is must be whole, in order, and never less than before."""
    if reader.problems:
        raise Broken(f"while writing: {reader.problems}")
    ids = reader.column("groups/group_id")
    if not np.array_equal(ids, np.arange(len(ids))):
        raise Broken("groups are not in order while writing")
    if len(ids) < seen:
        raise Broken(f"{seen} groups had been there, now {len(ids)}")
    if reader.num_rows("rollouts") != GROUP * len(ids):
        raise Broken("a group without its rollouts is visible")
    lengths = reader.column("rollouts/completion_length")
    if reader.num_rows("tokens") != lengths.sum():
        raise Broken("rollouts without their tokens are visible")
    if len(ids):
        _compare(reader, int(ids[-1]))
    reader.close()
    return len(ids)


def _compare(reader: RolloutReader, group: int) -> None:
    """The newest group holds what was written, to the last bit."""
    row = GROUP * group
    for index, completion in enumerate(_group(group).completions):
        place = reader.row("rollouts", row + index, ["token_offset", "completion_length"])
        for path, written in (
            ("tokens/id", completion.token_ids),
            ("tokens/logprob_behaviour", completion.logprobs),
        ):
            if not np.array_equal(reader.slice(path, *place.values()), written):
                raise Broken(f"{path} of group {group} is not what was written")


# ---------------------------------------------------------------- command line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    kill = commands.add_parser("crash")
    kill.add_argument("--kills", type=int, default=200)
    kill.add_argument("--seed", type=int, default=7)
    commands.add_parser("read").add_argument("--seconds", type=float, default=600.0)
    child = commands.add_parser("write")
    child.add_argument("folder", type=Path)
    child.add_argument("attempt", type=int)
    child.add_argument("compression")
    child.add_argument("flush", type=int)
    child.add_argument("parts", type=int)
    child.add_argument("ahead", type=int)
    options = parser.parse_args()
    if options.command == "write":
        write(
            options.folder,
            options.attempt,
            options.compression,
            options.flush,
            options.parts,
            options.ahead,
        )
    try:
        figures = (
            crash(options.kills, options.seed)
            if options.command == "crash"
            else read(options.seconds)
        )
    except Broken as error:
        sys.exit(f"broken: {error}")
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
