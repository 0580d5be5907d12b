"""One HDF5 file of the store, read; and the names in the folder.

With `encode` the only module that knows h5py, which is imported when first used.
"""

from __future__ import annotations

import json
import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llamarl_hpc.errors import StoreError
from llamarl_hpc.storage.rollout_store.encode import checksum
from llamarl_hpc.storage.rollout_store.filters import load_filters
from llamarl_hpc.storage.rollout_store.layout import (
    FORMAT,
    FORMAT_VERSION,
    TABLES,
    Block,
    column_of,
    empty_column,
)
from llamarl_hpc.types import Array


class RolloutFile:
    """One file of the store, read lazily. Raises StoreError when it is damaged or too new.

    Low-level calls of h5py: a run has thousands of files, and a look at one takes a fifth so long.
    """

    def __init__(self, source: Path | bytes, name: str, folder: Path | None = None) -> None:
        """Open a file by path, or one that has been read into memory; `name` is for messages,
        `folder` the store that it belongs to."""
        self.name, self.folder = name, folder
        try:
            self._id = _open(source)
        except (OSError, ValueError, RuntimeError) as error:  # as h5py sees fit
            raise self._damaged(f"{name} cannot be opened: {error}") from error
        try:
            self._check_version()
            self._rows = self._table_rows()
            self.first_rollout_id = self._number("first_rollout_id")
        except BaseException:
            self.close()
            raise

    def _check_version(self) -> None:
        if self.attribute("format") != FORMAT:
            raise self._damaged(f"{self.name} is not a file of the rollout store")
        version = self._number("format_version")
        if version > FORMAT_VERSION:
            raise NewerFormatError(
                f"{self.name} has format {version}; this version of llamarl-hpc reads up to "
                f"{FORMAT_VERSION}, so install a newer one"
            )

    def _table_rows(self) -> dict[str, int]:
        text = self.attribute("table_rows")
        try:
            pairs = (entry.rsplit("=", 1) for entry in str(text).split())
            rows = {table: int(number) for table, number in pairs}
        except ValueError:
            rows = {}
        if not rows.keys() >= set(TABLES) or min(rows.values()) < 0:
            raise self._damaged(f"{self.name} is damaged: its attribute table_rows is {text!r}")
        return rows

    def _number(self, name: str) -> int:
        value = self.attribute(name)
        try:
            return int(value)
        except (TypeError, ValueError):
            raise self._damaged(
                f"{self.name} is damaged: its attribute {name} is {value!r}"
            ) from None

    # ------------------------------------------------------------ attributes

    def attribute(self, name: str) -> Any:
        """Text, number, or None when the file does not have it."""
        from h5py import h5a

        try:
            if not h5a.exists(self._id, name.encode()):
                return None
            attribute = h5a.open(self._id, name.encode())
            value = np.empty(attribute.shape, attribute.dtype)
            attribute.read(value)
            found = value.item()
            return found.decode().strip(" ") if isinstance(found, bytes) else found
        except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
            raise self._damaged(
                f"{self.name} is damaged: its attribute {name} cannot be read: {error}"
            ) from error

    @property
    def attributes(self) -> dict[str, Any]:
        """Those that say where the rows come from; not what the store keeps for itself."""
        from h5py import h5a

        names: list[str] = []
        h5a.iterate(self._id, lambda name: names.append(name.decode()))
        return {name: self.attribute(name) for name in names if name not in _OWN_ATTRIBUTES}

    # ------------------------------------------------------------ columns

    def paths(self) -> list[str]:
        """Paths of all columns that this version knows."""
        found = [f"{t}/{name}" for t in (*TABLES, "rewards") for name in self._names(t)]
        return [path for path in found if _is_known(path)]

    def _names(self, table: str) -> list[str]:
        import h5py

        try:
            return list(h5py.Group(h5py.h5g.open(self._id, table.encode())))
        except KeyError:
            return []
        except (OSError, RuntimeError) as error:
            raise self._damaged(f"/{table} of {self.name} cannot be read: {error}") from error

    def reward_names(self) -> list[str]:
        """Names of the reward components; without opening anything where the file says them."""
        said = self.attribute("rewards")
        try:
            return [str(name) for name in json.loads(said)] if said else self._names("rewards")
        except ValueError:
            return self._names("rewards")

    def num_rows(self) -> dict[str, int]:
        """Rows of every table; taken from the file's attribute, which spares opening datasets."""
        return dict(self._rows)

    def has(self, path: str) -> bool:
        """Whether there is such a column, sound or damaged."""
        from h5py import h5d

        try:
            h5d.open(self._id, path.encode())
        except KeyError:
            return False
        except (OSError, RuntimeError):
            return True
        return True

    def read(self, path: str, start: int = 0, stop: int | None = None) -> Array:
        """Rows start..stop of a column; a column that the file lacks reads as unknown.

        Checksums are compared: of a chunked column those of the chunks that are read, of another
        one its own when it is read whole.
        """
        array = self._read(path, start, stop)
        is_whole = (start, stop) == (0, None)
        if is_whole and self.damaged_columns({path: array}) and self.has(path):
            raise self._damaged(f"{path} of {self.name} cannot be read: its checksum is wrong")
        return array

    def _read(self, path: str, start: int, stop: int | None) -> Array:
        import h5py

        try:
            dataset = h5py.Dataset(h5py.h5d.open(self._id, path.encode()))
        except KeyError:
            table = path.split("/")[0]
            rows = self._rows["rollouts" if table == "rewards" else table]
            return empty_column(column_of(path), rows)[start:stop]
        except (OSError, RuntimeError) as error:
            raise self._damaged(f"{path} of {self.name} cannot be read: {error}") from error
        try:
            array: Array = dataset[start : dataset.shape[0] if stop is None else stop]
        except (OSError, RuntimeError, ValueError, TypeError) as error:
            if isinstance(error, OSError) and load_filters(dataset, self.name):
                return self._read(path, start, stop)
            raise self._damaged(f"{path} of {self.name} cannot be read: {error}") from error
        return array

    def read_what_can_be(self, path: str, num_rows: int) -> tuple[Array, Array]:
        """A column of `num_rows`, zero where it cannot be read, and the mask of those rows."""
        import h5py

        column = column_of(path)
        values = empty_column(column, num_rows)
        lost = np.ones(num_rows, dtype=bool)
        try:
            dataset = h5py.Dataset(h5py.h5d.open(self._id, path.encode()))
            values = np.zeros(num_rows, dtype=dataset.dtype)
            step = dataset.chunks[0] if dataset.chunks else max(num_rows, 1)
            stop = min(num_rows, len(dataset))
        except (OSError, RuntimeError, KeyError, TypeError, ValueError):
            return values, lost
        load_filters(dataset, self.name)
        for start in range(0, stop, step):
            end = min(start + step, stop)
            try:
                values[start:end] = dataset[start:end]
                lost[start:end] = False
            except (OSError, RuntimeError, ValueError):
                continue
        return values, lost

    def block(self) -> Block:
        """Everything; checksums of columns that are not chunked are not compared."""
        return {path: self._read(path, 0, None) for path in self.paths()}

    def damaged_columns(self, block: Block) -> list[str]:
        """Columns of `block` whose bytes are not those that were written (chunks check theirs)."""
        written = self._checksums
        return [
            path
            for path, array in block.items()
            if path in written and checksum(array) != written[path]
        ]

    @cached_property
    def _checksums(self) -> dict[str, str]:
        entries = str(self.attribute("checksums") or "").split()
        return {path: digits for path, _, digits in (entry.rpartition("=") for entry in entries)}

    def _damaged(self, message: str) -> DamagedFileError:
        return DamagedFileError(message, self.name, self.folder)

    def close(self) -> None:
        if self._id.valid:
            self._id.close()


class DamagedFileError(StoreError):
    """A file, or a part of it, that is not as it was written. The rest of the run can be read."""

    def __init__(self, message: str, file_name: str, folder: Path | None) -> None:
        super().__init__(message)
        self.file_name, self.folder = file_name, folder

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.file_name, self.folder)


class NewerFormatError(StoreError):
    """A file that only a newer version can read."""


_OWN_ATTRIBUTES = {"format", "format_version", "format_minor", "table_rows", "rewards", "checksums"}


def _open(source: Path | bytes) -> Any:
    from h5py import h5f, h5p

    if isinstance(source, bytes):
        return h5f.open_file_image(source)
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    # Files never change once they have their name, so there is nothing to lock.
    access.set_file_locking(False, True)
    return h5f.open(os.fsencode(source), h5f.ACC_RDONLY, fapl=access)


def _is_known(path: str) -> bool:
    try:
        column_of(path)
    except KeyError:
        return False
    return True


# ---------------------------------------------------------------- names in the folder


def segment_path(folder: Path, number: int) -> Path:
    """A closed segment."""
    return folder / f"segment_{number:06d}.h5"


def open_path(folder: Path, number: int) -> Path:
    """The folder of an open segment's parts."""
    return folder / f"segment_{number:06d}.open"


def segment_numbers(folder: Path) -> dict[int, bool]:
    """Segments there are, in order; True where it is closed."""
    # Open ones first: a segment that is closed between the two looks is then seen twice, not never.
    opened = {_number(path): False for path in folder.glob("segment_*.open")}
    closed = {_number(path): True for path in folder.glob("segment_*.h5")}
    return dict(sorted((opened | closed).items()))


def part_path(opened: Path, part: int) -> Path:
    """A file of an open segment: one flush."""
    return opened / f"part_{part:06d}.h5"


def part_paths(opened: Path) -> list[Path]:
    return sorted(opened.glob("part_*.h5"))


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("segment_"))
