"""Reading a folder of the rollout store: all its files as one set of tables.

A `RolloutReader` is a snapshot: what was flushed when it was made (or `refresh`ed), for ever the
same, however the run goes on. It takes no locks. Rows are in the order of files, that is in the
order in which groups were resolved; row references are those of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llamarl_hpc.storage.rollout_store.file import (
    DamagedFileError,
    RolloutFile,
)
from llamarl_hpc.storage.rollout_store.header import Header
from llamarl_hpc.storage.rollout_store.layout import TABLES, Block, column_of, empty_column
from llamarl_hpc.storage.rollout_store.names import (
    open_path,
    part_paths,
    segment_numbers,
    segment_path,
)
from llamarl_hpc.types import Array, VersionSpan

MAX_OPEN_FILES = 256  # well below the usual limit of 1,024 descriptors
_MAX_TRIES = 20


@dataclass
class _Source:
    """One file of the snapshot."""

    name: str
    content: Path | bytes  # parts are read into memory: they go when their segment is closed
    header: Header | None = None  # None: not opened yet
    reward_names: list[str] = field(default_factory=list)

    @property
    def rows(self) -> dict[str, int]:
        return self.header.rows if self.header else {}

    @property
    def first_rollout_id(self) -> int:
        return self.header.first_rollout_id if self.header else -1


class RolloutReader:
    """All rows of a run. Raises StoreError when the folder holds a format that is too new."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, RolloutFile] = {}
        self._sources: list[_Source] = []
        self._bases: dict[str, Array] = {}  # first row of each file in the whole, and the end
        # files that turned out to be damaged: why, and how many rollouts they have
        self._left_out: dict[str, tuple[str, int]] = {}
        self.problems: list[str] = []  # files that are left out: why, and what is missing
        self.refresh()

    def refresh(self) -> None:
        """See what has been flushed since."""
        self.close()
        self._sources = []
        lost: list[tuple[int, str, int]] = []  # (place among the sources, why, rollouts or -1)
        for source in _snapshot(self._folder):
            why, rollouts = self._left_out.get(source.name) or (self._opened(source), -1)
            if why:
                lost.append((len(self._sources), why, rollouts))
            else:
                self._sources.append(source)
        self.problems = [
            f"left out: {why}; {_counted(rollouts if rollouts >= 0 else self._missing(place))}"
            for place, why, rollouts in lost
        ]
        counts = {t: [source.rows[t] for source in self._sources] for t in TABLES}
        self._bases = {t: np.cumsum([0, *rows], dtype=np.int64) for t, rows in counts.items()}

    def leave_out(self, error: DamagedFileError) -> None:
        """From now on this is the reader of a run without the damaged file: rows move up."""
        of_file = (s.rows["rollouts"] for s in self._sources if s.name == error.file_name)
        self._left_out[error.file_name] = (str(error), next(of_file, -1))
        self.refresh()

    def _opened(self, source: _Source) -> str:
        """Fill in what a file says of itself; why not, if it is damaged."""
        try:
            file = RolloutFile(source.content, source.name, self._folder)
            self._keep(len(self._sources), file)
            source.reward_names = file.reward_names()
        except DamagedFileError as error:
            return str(error)
        source.header = file.header
        return ""

    def _missing(self, place: int) -> int:
        """Rollouts missing between two files, whose ids follow one another; -1: not known."""
        around = [
            s for s in self._sources[max(0, place - 1) : place + 1] if s.first_rollout_id >= 0
        ]
        if len(around) < 2:
            return -1
        before, after = around
        missing = after.first_rollout_id - before.first_rollout_id - before.rows["rollouts"]
        return missing if 0 < missing < 1 << 32 else -1  # else `after` is of another attempt

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    # ------------------------------------------------------------ what there is

    @property
    def file_names(self) -> list[str]:
        return [source.name for source in self._sources]

    @property
    def attributes(self) -> dict[str, Any]:
        """Of the newest file; empty when there is none."""
        return self._file(len(self._sources) - 1).attributes if self._sources else {}

    @property
    def reward_names(self) -> list[str]:
        return list(dict.fromkeys(name for s in self._sources for name in s.reward_names))

    def reward_names_at(self, row: int) -> list[str]:
        """Those of the file that holds the rollout at this row; the others do not apply to it."""
        return self._sources[self._locate("rollouts", row)[0]].reward_names

    def num_rows(self, table: str) -> int:
        return int(self._bases[table][-1])

    # ------------------------------------------------------------ whole columns

    def column(self, path: str) -> Array:
        """A whole column. An enumeration gives codes (`layout.ENUMS`), a string bytes."""
        refers = column_of(path).refers
        parts = []
        for index in range(len(self._sources)):
            array = self._file(index).read(path)
            base = int(self._bases[refers][index]) if refers else 0
            parts.append(array + np.array(base, dtype=array.dtype) if base else array)
        return np.concatenate(parts) if parts else empty_column(column_of(path))

    def columns(self, table: str, names: Sequence[str]) -> Block:
        """Several columns of a table, by name."""
        return {name: self.column(f"{table}/{name}") for name in names}

    def texts(self, column: str, flat: str, rows: Array) -> list[str]:
        """Texts at these rows of the whole (`RolloutFile.texts`); other files are not read."""
        bases = self._bases[column.split("/")[0]]
        files = np.searchsorted(bases, rows, side="right") - 1
        found = [""] * len(rows)
        for index in np.unique(files).tolist():
            mine = np.flatnonzero(files == index)
            texts = self._file(index).texts(column, flat, rows[mine] - bases[index])
            for place, text in zip(mine.tolist(), texts, strict=True):
                found[place] = text
        return found

    def scan(self, *, newest_first: bool = False) -> Iterator[tuple[str, RolloutFile]]:
        """File by file, so that memory stays bounded; references are the file's own.

        A file is open until the next is asked for: there may be more than can be open at once.
        """
        indices = range(len(self._sources))
        for index in reversed(indices) if newest_first else indices:
            yield self._sources[index].name, self._file(index)

    # ------------------------------------------------------------ single rows

    def slice(self, path: str, start: int, length: int) -> Array:
        """`length` rows from row `start` of the whole; the run must lie in one file."""
        index, local = self._locate(path.split("/")[0], start)
        array = self._file(index).read(path, local, local + length)
        refers = column_of(path).refers
        base = int(self._bases[refers][index]) if refers else 0
        return array + np.array(base, dtype=array.dtype) if base else array

    def version_spans(self, rollout: int) -> list[VersionSpan]:
        """Which version sampled which tokens of the rollout at this row of the whole."""
        index, local = self._locate("rollouts", rollout)
        file = self._file(index)
        first, last = np.searchsorted(file.read("versions/rollout"), [local, local + 1])
        columns = [
            file.read(f"versions/{name}", int(first), int(last)).tolist()
            for name in ("start", "end", "version")
        ]
        return [VersionSpan(*values) for values in zip(*columns, strict=True)]

    def _locate(self, table: str, row: int) -> tuple[int, int]:
        """(file, row in it) of a row of the whole; one past the end is in the last file."""
        bases = self._bases["rollouts" if table == "rewards" else table]
        if not 0 <= row <= bases[-1] or not self._sources:
            raise IndexError(f"{table} has no row {row}")
        index = int(np.searchsorted(bases, row, side="right")) - 1
        index = min(index, len(self._sources) - 1)
        return index, row - int(bases[index])

    def row(self, table: str, row: int, names: Sequence[str]) -> dict[str, Any]:
        """Some columns of one row, as Python values."""
        return {name: self.slice(f"{table}/{name}", row, 1)[0].item() for name in names}

    def text(self, path: str, start: int, length: int) -> str:
        """UTF-8 text of a flat byte column."""
        data = self.slice(path, start, length).tobytes() if length else b""
        return data.decode("utf-8", errors="replace")

    def find_rollout(self, rollout_id: int) -> int:
        """Row of a rollout in the whole. Raises KeyError."""
        for source, base in zip(self._sources, self._bases["rollouts"], strict=False):
            offset, rows = rollout_id - source.first_rollout_id, source.rows["rollouts"]
            if rows and 0 <= offset < rows:
                return int(base) + offset
        raise KeyError(f"no rollout {rollout_id} in {self._folder}")

    def _file(self, index: int) -> RolloutFile:
        if index not in self._files:
            source = self._sources[index]
            self._keep(
                index, RolloutFile(source.content, source.name, self._folder, header=source.header)
            )
        return self._files[index]

    def _keep(self, index: int, file: RolloutFile) -> None:
        if len(self._files) >= MAX_OPEN_FILES:
            self._files.pop(next(iter(self._files))).close()
        self._files[index] = file


def _counted(rollouts: int) -> str:
    if rollouts < 0:
        return "how many rollouts are missing is not known"
    return f"{rollouts} rollouts are missing"


def _snapshot(folder: Path) -> list[_Source]:
    """The files that together hold every flushed row once, though a writer may be at work."""
    found: list[_Source] = []
    for number in segment_numbers(folder):
        found += _segment(folder, number)
    return found


def _segment(folder: Path, number: int) -> list[_Source]:
    closed, opened = segment_path(folder, number), open_path(folder, number)
    for _ in range(_MAX_TRIES):
        if closed.exists():
            return [_Source(closed.name, closed)]
        try:
            parts = [
                _Source(f"{opened.name}/{path.name}", path.read_bytes())
                for path in part_paths(opened)
            ]
        except OSError:  # the segment is being closed: its parts go after its file has come
            continue
        if not closed.exists():
            return parts
    # They are no files, or the disk refuses them: opening them by their path will say what it is.
    return [_Source(f"{opened.name}/{path.name}", path) for path in part_paths(opened)]
