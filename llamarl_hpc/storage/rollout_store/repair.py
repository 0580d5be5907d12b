"""What can be saved of damaged files, written to another folder. The original is never changed.

A row that cannot be read, or whose checksum is wrong, costs its group; a measured number
(float) that is lost becomes NaN, which the format reads as unknown, and costs nothing else. A file
that ends too early is read as far as it goes. Every run of kept groups becomes one closed segment,
for the rollouts of a file have consecutive ids.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from llamarl_hpc.errors import StoreError
from llamarl_hpc.storage import atomic
from llamarl_hpc.storage.rollout_store import blocks
from llamarl_hpc.storage.rollout_store.encode import encode
from llamarl_hpc.storage.rollout_store.file import RolloutFile
from llamarl_hpc.storage.rollout_store.filters import MissingFilterError
from llamarl_hpc.storage.rollout_store.header import NewerFormatError
from llamarl_hpc.storage.rollout_store.layout import COLUMNS, Block, column_of
from llamarl_hpc.storage.rollout_store.names import (
    open_path,
    part_paths,
    segment_numbers,
    segment_path,
)
from llamarl_hpc.types import Array

_SUPERBLOCK_END = 40  # where HDF5's first superblock says how long the file is


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRepair:
    """What became of one file."""

    name: str
    groups: int  # that it should hold; 0 when not even that can be read
    kept: int
    problems: list[str] = field(default_factory=list)


def repair(
    source: Path, target: Path, *, say: Callable[[FileRepair], None] = lambda _: None
) -> list[FileRepair]:
    """Copy the store in `source` to the new folder `target`, damaged files as far as they go.

    Raises StoreError when `target` exists, and for a file that is whole but cannot be read here.
    """
    if target.exists():
        raise StoreError(f"{target} exists already; name a new folder")
    target.mkdir(parents=True)
    done, number = [], 0
    for path in _paths(source):
        result, number = _repair_file(path, target, number)
        say(result)
        done.append(result)
    return done


def _paths(source: Path) -> list[Path]:
    found: list[Path] = []
    for number, closed in segment_numbers(source).items():
        if closed:
            found.append(segment_path(source, number))
        else:
            found += part_paths(open_path(source, number))
    return found


def _repair_file(path: Path, target: Path, number: int) -> tuple[FileRepair, int]:
    """The result and the number of the next segment."""
    name = path.name if path.suffix == ".h5" and "part" not in path.name else _part_name(path)
    try:
        block, bad, attributes, problems = _read(path, name)
    except (NewerFormatError, MissingFilterError):
        raise
    except StoreError as error:
        return FileRepair(name=name, groups=0, kept=0, problems=[str(error)]), number
    num_groups = blocks.num_rows(block, "groups")
    if not problems:
        shutil.copyfile(path, segment_path(target, number))
        return FileRepair(name=name, groups=num_groups, kept=num_groups), number + 1
    keep = sound_groups(block, bad)
    for first, last in _runs(keep):
        part = blocks.take_groups(block, first, last)
        ids = part["rollouts/rollout_id"]
        own = {
            "segment": number,
            "part": -1,
            "first_rollout_id": int(ids[0]) if len(ids) else -1,
            "num_rollouts": len(ids),
            "repaired_from": name,
        }
        image = encode(part, attributes | own, compression="gzip")
        atomic.write_bytes(segment_path(target, number), image)
        number += 1
    kept = int(keep.sum())
    return FileRepair(name=name, groups=num_groups, kept=kept, problems=problems), number


def _part_name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _read(path: Path, name: str) -> tuple[Block, dict[str, Array], dict[str, Any], list[str]]:
    """Columns, bool masks of their bad rows (where there are any), attributes, what is wrong."""
    content: Path | bytes = path
    problems: list[str] = []
    try:
        file = RolloutFile(path, name)
    except NewerFormatError:
        raise
    except StoreError as error:
        problems.append(str(error))
        try:
            content = _padded(path)
        except OSError as reason:
            raise StoreError(f"{name} cannot be read: {reason}") from reason
        file = RolloutFile(content, name, believe=True)
    try:
        block, bad = _read_columns(file, problems)
        attributes = file.attributes
    finally:
        file.close()
    if not problems:
        problems += [f"{name}: {problem}" for problem in blocks.problems(block)]
    return block, bad, attributes, problems


def _padded(path: Path) -> bytes:
    """A file that was cut short, filled with zeros to the length it says it has."""
    data = path.read_bytes()
    length = int.from_bytes(data[_SUPERBLOCK_END : _SUPERBLOCK_END + 8], "little")
    if not len(data) < length < 1 << 40:
        return data
    return data + bytes(length - len(data))


def _read_columns(file: RolloutFile, problems: list[str]) -> tuple[Block, dict[str, Array]]:
    block: Block = {}
    bad: dict[str, Array] = {}
    for path in _paths_of(file):
        block[path], lost = file.read_what_can_be(path)
        if lost.any():
            bad[path] = lost
    for path, lost in bad.items():
        problems.append(f"{file.name}: {int(lost.sum())} of {len(lost)} rows of {path} are damaged")
        if column_of(path).dtype.startswith("f"):
            block[path] = np.where(lost, np.nan, block[path]).astype(block[path].dtype)
    return block, bad


def _paths_of(file: RolloutFile) -> list[str]:
    """Columns that the file should have."""
    wanted = [path for path, column in COLUMNS.items() if not column.optional or file.has(path)]
    return list(dict.fromkeys([*wanted, *file.paths()]))


def sound_groups(block: Block, bad: dict[str, Array]) -> Array:
    """bool [G]: groups none of whose rows is damaged, and whose references lead somewhere."""
    lost = {
        table: np.zeros(blocks.num_rows(block, table), dtype=bool)
        for table in dict.fromkeys(path.split("/")[0] for path in COLUMNS)
    }
    for path, rows in bad.items():
        if not column_of(path).dtype.startswith("f"):
            lost[path.split("/")[0]] |= rows
    spans = _spans_cover(block)
    lost["rollouts"] |= ~spans | _points_to_lost(block, "versions/rollout", lost["versions"])
    for table, runs in blocks.RAGGED.items():
        for start, length, flat in runs:
            lost[table] |= _touches(
                block[f"{table}/{start}"], block[f"{table}/{length}"], lost[flat]
            )
    found = lost["groups"] | _touches(
        block["groups/first_rollout"], block["groups/num_rollouts"], lost["rollouts"]
    )
    for name, table in (("prompt", "prompts"), ("generator", "generators"), ("reason", "reasons")):
        found |= _refers_to_lost(block[f"groups/{name}"], lost[table])
    return ~found


def _spans_cover(block: Block) -> Array:
    """bool [R]: version spans add up to the tokens of the rollout."""
    num = blocks.num_rows(block, "rollouts")
    rollout = block["versions/rollout"]
    inside = (rollout >= 0) & (rollout < num)
    lengths = (block["versions/end"] - block["versions/start"])[inside]
    covered = np.bincount(rollout[inside], weights=lengths, minlength=num)
    result: Array = covered == block["rollouts/completion_length"]
    return result


def _points_to_lost(block: Block, path: str, lost: Array) -> Array:
    """bool [R]: rollouts that a damaged span names."""
    found = np.zeros(blocks.num_rows(block, "rollouts"), dtype=bool)
    rows = block[path][lost]
    found[rows[(rows >= 0) & (rows < len(found))]] = True
    return found


def _touches(start: Array, length: Array, lost: Array) -> Array:
    """bool: the run start..start+length is not wholly inside the table, or touches a lost row."""
    before = np.concatenate([[0], np.cumsum(lost)])
    begin, end = start.astype(np.int64), start.astype(np.int64) + length
    outside = (begin < 0) | (length < 0) | (end > len(lost))
    begin, end = np.where(outside, 0, begin), np.where(outside, 0, end)
    result: Array = outside | (before[end] > before[begin])
    return result


def _refers_to_lost(rows: Array, lost: Array) -> Array:
    outside = (rows < 0) | (rows >= len(lost))
    if not len(lost):
        return outside
    result: Array = outside | lost[np.where(outside, 0, rows)]
    return result


def _runs(keep: Array) -> list[tuple[int, int]]:
    """(first, last) of each run of True; last excluded."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], keep, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for i, (a, b) in enumerate(pairwise(edges)) if i % 2 == 0]
