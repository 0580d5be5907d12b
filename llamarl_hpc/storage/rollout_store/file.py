"""One HDF5 file of the store, read.

What HDF5 says is not believed: of every column the rows, the type and the checksum are compared.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from llamarl_hpc.errors import StoreError
from llamarl_hpc.storage.rollout_store import blocks, checksums, hdf5
from llamarl_hpc.storage.rollout_store.filters import MissingFilterError, load_filters
from llamarl_hpc.storage.rollout_store.hdf5 import H5_ERRORS
from llamarl_hpc.storage.rollout_store.header import Header
from llamarl_hpc.storage.rollout_store.layout import (
    COLUMNS,
    TABLES,
    Block,
    Column,
    column_of,
    empty_column,
)
from llamarl_hpc.types import Array


class RolloutFile:
    """One file of the store, read lazily. Raises StoreError when it is damaged or too new."""

    def __init__(
        self,
        source: Path | bytes,
        name: str,
        folder: Path | None = None,
        *,
        header: Header | None = None,
        believe: bool = False,
    ) -> None:
        """Open a file by path, or one that has been read into memory; `name` is for messages,
        `folder` the store that it belongs to. `header` is that of an earlier look: files do not
        change. `believe` what the attributes say though they are not those that were written (to
        save what can be)."""
        self.name, self.folder = name, folder
        self._sound: set[str] = set()  # columns whose checksum has been compared
        try:
            self._id = hdf5.open_file(source)
        except H5_ERRORS as error:
            raise self._damaged(f"{name} cannot be opened: {error}") from error
        try:
            self.header = header or self._read_header(believe)
        except BaseException:
            self.close()
            raise

    def _read_header(self, believe: bool) -> Header:
        try:
            attributes = hdf5.attributes(self._id)
        except H5_ERRORS as error:
            raise self._damaged(
                f"{self.name} is damaged: its attributes cannot be read: {error}"
            ) from error
        try:
            rows = self._rows_that_lie_there() if believe else None
            return Header.of(self.name, attributes, rows=rows)
        except ValueError as error:
            raise self._damaged(str(error)) from None

    def _rows_that_lie_there(self) -> dict[str, int]:
        """Rows that most columns of a table have; 0 where none can be opened."""
        found = {}
        for table in TABLES:
            lengths: Counter[int] = Counter()
            for path in (path for path, column in COLUMNS.items() if column.table == table):
                with suppress(*H5_ERRORS):
                    lengths[hdf5.dataset(self._id, path).shape[0]] += 1
            found[table] = lengths.most_common(1)[0][0] if lengths else 0
        return found

    @property
    def attributes(self) -> dict[str, Any]:
        """Those that say where the rows come from; not what the store keeps for itself."""
        values = self.header.attributes.items()
        return {name: value for name, value in values if name not in _OWN_ATTRIBUTES}

    # ------------------------------------------------------------ columns

    def paths(self) -> list[str]:
        """Paths of all columns that the file was given and this version knows."""
        found = (
            list(self.header.checksums)
            if self.header.all_checked
            else [f"{t}/{name}" for t in (*TABLES, "rewards") for name in self._names(t)]
        )
        return [path for path in found if _is_known(path)]

    def _names(self, table: str) -> list[str]:
        try:
            return hdf5.names(self._id, table)
        except H5_ERRORS as error:
            raise self._damaged(f"/{table} of {self.name} cannot be read: {error}") from error

    def reward_names(self) -> list[str]:
        """Names of the reward components; without opening anything where the file says them."""
        said = self.header.attributes.get("rewards")
        try:
            return [str(name) for name in json.loads(said)] if said else self._names("rewards")
        except (ValueError, TypeError):
            return self._names("rewards")

    def num_rows(self) -> dict[str, int]:
        """Rows of every table; taken from the file's attribute, which spares opening datasets."""
        return dict(self.header.rows)

    def _rows_of(self, path: str) -> int:
        table = path.split("/")[0]
        return self.header.rows["rollouts" if table == "rewards" else table]

    def has(self, path: str) -> bool:
        """Whether the file was given such a column, sound or damaged now."""
        return (
            path in self.header.checksums if self.header.all_checked else hdf5.has(self._id, path)
        )

    def read(self, path: str, start: int = 0, stop: int | None = None) -> Array:
        """Rows start..stop of a column; a column that the file was never given reads as unknown.

        Checksums are compared: the column's own when it is read whole, or is small, else those of
        the chunks that are read, if it has any.
        """
        rows = self._rows_of(path)
        stop = rows if stop is None else min(stop, rows)
        if not self.has(path):
            return empty_column(column_of(path), max(stop - start, 0))
        small = rows * _row_bytes(path) <= _SMALL_BYTES and path not in self._sound
        if not small and (start, stop) != (0, rows):
            return self._read(path, start, stop)
        array = self._read(path, 0, rows)
        if self.damaged_columns({path: array}):
            raise self._damaged(f"{path} of {self.name} cannot be read: its checksum is wrong")
        self._sound.add(path)
        return array[start:stop]

    def texts(self, column: str, flat: str, rows: Array) -> list[str]:
        """UTF-8 texts at these rows: `column` without `_offset` and `_length`, into `flat`."""
        start, length = self.read(f"{column}_offset"), self.read(f"{column}_length")
        data = self.read(flat).tobytes()
        spans = zip(start[rows].tolist(), length[rows].tolist(), strict=True)
        return [data[at : at + n].decode("utf-8", errors="replace") for at, n in spans]

    def _read(self, path: str, start: int, stop: int) -> Array:
        """Rows of a column that the file has; its own checksum is not compared."""
        try:
            dataset = self._dataset(path)
            try:
                return hdf5.rows(dataset, start, stop)
            except OSError:
                if not load_filters(dataset, self.name):
                    raise
                return hdf5.rows(dataset, start, stop)
        except MissingFilterError:
            raise
        except H5_ERRORS as error:
            raise self._damaged(f"{path} of {self.name} cannot be read: {error}") from error

    def _dataset(self, path: str) -> Any:
        """Raises ValueError for one that is not what the format wants."""
        dataset = hdf5.dataset(self._id, path)
        if dataset.shape != (self._rows_of(path),):
            raise ValueError(f"it has {dataset.shape} rows, but should have {self._rows_of(path)}")
        if not _is_of_type(dataset.dtype, column_of(path)):
            raise ValueError(f"its type is {dataset.dtype}, not {column_of(path).dtype}")
        return dataset

    def read_what_can_be(self, path: str) -> tuple[Array, Array]:
        """A column, zero where it cannot be read, and the mask of those rows."""
        num_rows = self._rows_of(path)
        lost = np.ones(num_rows, dtype=bool)
        try:
            dataset = self._dataset(path)
            values = np.zeros(num_rows, dtype=dataset.dtype)
            load_filters(dataset, self.name)
        except MissingFilterError:
            raise
        except H5_ERRORS:
            return empty_column(column_of(path), num_rows), lost
        step = hdf5.chunk_rows(dataset) or max(num_rows, 1)
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            with suppress(*H5_ERRORS):
                values[start:stop] = hdf5.rows(dataset, start, stop)
                lost[start:stop] = False
        if not lost.any() and self.damaged_columns({path: values}):
            lost[:] = True
        return values, lost

    def checked_block(self) -> tuple[Block, list[str]]:
        """Everything that can be read, and what is wrong: sentences, none when it is sound."""
        block: Block = {}
        faults: list[str] = []
        for path in self.paths():
            try:
                block[path] = self.read(path)
            except DamagedFileError as error:
                faults.append(str(error))
        lacking = [path for path, column in COLUMNS.items() if not column.optional]
        lacking = [path for path in lacking if not self.has(path)]
        faults += [f"{self.name} lacks the column {path}" for path in lacking]
        if not faults:
            faults += [f"{self.name}: {problem}" for problem in blocks.problems(block)]
        return block, faults

    def block(self) -> Block:
        """Everything. Raises DamagedFileError."""
        return {path: self.read(path) for path in self.paths()}

    def damaged_columns(self, block: Block) -> list[str]:
        """Columns of `block` whose bytes are not those that were written."""
        return [
            path
            for path, array in block.items()
            if path in self.header.checksums
            and checksums.checksum(array) != self.header.checksums[path]
        ]

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


_OWN_ATTRIBUTES = {"format", "format_version", "format_minor", "table_rows", "rewards", "checksums"}
_SMALL_BYTES = 256 << 10  # a column of so many is read whole at first, for its checksum
_TEXT_BYTES = 64  # about, of a row of texts


def _is_known(path: str) -> bool:
    try:
        column_of(path)
    except KeyError:
        return False
    return True


def _row_bytes(path: str) -> int:
    dtype = column_of(path).dtype
    return _TEXT_BYTES if dtype == "S" else np.dtype(dtype).itemsize


def _is_of_type(dtype: np.dtype[Any], column: Column) -> bool:
    return dtype.kind == "S" if column.dtype == "S" else dtype == np.dtype(column.dtype)
