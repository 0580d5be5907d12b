"""One HDF5 file of the store, read; and the names in the folder.

With `encode` the only module that knows h5py, which is imported when first used.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from llamarl_hpc.errors import StoreError
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
    """One file of the store, read lazily. Raises StoreError when it is damaged or too new."""

    def __init__(self, source: Path | bytes, name: str) -> None:
        """Open a file by path, or one that has been read into memory; `name` is for messages."""
        import h5py

        self.name = name
        try:
            if isinstance(source, bytes):
                self._file = h5py.File(io.BytesIO(source), "r")
            else:
                # Files never change once they have their name, so there is nothing to lock.
                self._file = h5py.File(source, "r", locking=False)
        except OSError as error:
            raise StoreError(f"{name} cannot be opened: {error}") from error
        try:
            self._check_version()
        except BaseException:
            self.close()
            raise

    def _check_version(self) -> None:
        if self.attribute("format") != FORMAT:
            raise StoreError(f"{self.name} is not a file of the rollout store")
        version = int(self.attribute("format_version"))
        if version > FORMAT_VERSION:
            raise StoreError(
                f"{self.name} has format {version}; this version of llamarl-hpc reads up to "
                f"{FORMAT_VERSION}, so install a newer one"
            )

    def attribute(self, name: str) -> Any:
        """Text, number, or None when the file does not have it."""
        value = self._file.attrs.get(name)
        return value.decode().strip(" ") if isinstance(value, bytes) else value

    @property
    def attributes(self) -> dict[str, Any]:
        return {name: self.attribute(name) for name in self._file.attrs}

    def paths(self) -> list[str]:
        """Paths of all columns that this version knows."""
        found = [f"{t}/{name}" for t in (*TABLES, "rewards") for name in self._file.get(t, ())]
        return [path for path in found if _is_known(path)]

    def reward_names(self) -> list[str]:
        return list(self._file.get("rewards", ()))

    def num_rows(self) -> dict[str, int]:
        """Rows of every table; taken from the file's attribute, which spares opening datasets."""
        pairs = (entry.split("=") for entry in str(self.attribute("table_rows")).split())
        return {table: int(rows) for table, rows in pairs}

    def read(self, path: str, start: int = 0, stop: int | None = None) -> Array:
        """Rows start..stop of a column; a column that the file lacks reads as unknown."""
        try:
            dataset = self._file.get(path)
            if dataset is None:
                table = path.split("/")[0]
                rows = self.num_rows()["rollouts" if table == "rewards" else table]
                return empty_column(column_of(path), rows)[start:stop]
            array: Array = dataset[start : dataset.shape[0] if stop is None else stop]
        except (OSError, RuntimeError) as error:
            raise StoreError(f"{path} of {self.name} cannot be read: {error}") from error
        return array

    def block(self) -> Block:
        """Everything."""
        return {path: self.read(path) for path in self.paths()}

    def close(self) -> None:
        self._file.close()


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
    closed = {_number(path): True for path in folder.glob("segment_*.h5")}
    opened = {_number(path): False for path in folder.glob("segment_*.open")}
    return dict(sorted((opened | closed).items()))


def part_paths(opened: Path) -> list[Path]:
    return sorted(opened.glob("part_*.h5"))


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("segment_"))
