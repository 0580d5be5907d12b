"""One HDF5 file of the store, made and read; and the names in the folder.

The only module that knows h5py, which is imported when first used.
"""

from __future__ import annotations

import io
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llamarl_hpc.errors import StoreError
from llamarl_hpc.storage.rollout_store import blocks
from llamarl_hpc.storage.rollout_store.layout import (
    FORMAT,
    FORMAT_MINOR,
    FORMAT_VERSION,
    TABLES,
    Block,
    column_of,
    empty_column,
)
from llamarl_hpc.types import Array

CHUNK_ROWS = 32_768  # 128 to 256 KiB: one rollout is read with one chunk of each column
CONTIGUOUS_BYTES = 4096  # smaller columns are cheaper without chunk index and filters
_MAX_ATTRIBUTE_BYTES = 32_768  # an object header message of HDF5's oldest format holds 64 KiB

Attributes = Mapping[str, str | int | float]


# ---------------------------------------------------------------- one file


def encode(block: Block, attributes: Attributes, *, compression: str = "none") -> bytes:
    """The HDF5 file that holds `block`, readable by HDF5 1.8 and later.

    With a compression ("gzip", "lzf"), or "checksum" for none, columns are chunked and every chunk
    carries a checksum; with "none" they are contiguous. Raises StoreError for an attribute that is
    too long.
    """
    import h5py

    with h5py.File(
        f"rollouts-{secrets.token_hex(8)}",  # HDF5 takes files of one name in a process for one
        "w",
        driver="core",
        backing_store=False,
        block_size=max(1 << 16, blocks.num_bytes(block) // 8),
        libver=("earliest", "v108"),
    ) as file:
        header: dict[str, str | int | float] = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "format_minor": FORMAT_MINOR,
        }
        header["table_rows"] = " ".join(f"{t}={blocks.num_rows(block, t)}" for t in TABLES)
        for name, value in (dict(attributes) | header).items():
            file.attrs[name] = _attribute(name, value)
        groups = {table: file.create_group(table) for table in (*TABLES, "rewards")}
        for path, array in block.items():
            _write_column(groups[path.split("/")[0]], path, array, compression)
        file.flush()
        image: bytes = file.id.get_file_image()
    return image


def _write_column(group: Any, path: str, array: Array, compression: str) -> None:
    import h5py

    column = column_of(path)
    if column.enum:
        dtype = h5py.enum_dtype(column.enum, basetype=column.dtype)
    elif column.dtype == "S":
        dtype = h5py.string_dtype("utf-8", array.dtype.itemsize)
    else:
        dtype = np.dtype(column.dtype)
    options: dict[str, Any] = {}
    if compression != "none" and array.nbytes > CONTIGUOUS_BYTES:
        options = {"chunks": (min(len(array), CHUNK_ROWS),), "fletcher32": True}
        if compression == "gzip":
            options |= {"compression": "gzip", "compression_opts": 1, "shuffle": True}
        elif compression == "lzf":
            options |= {"compression": "lzf", "shuffle": True}
    dataset = group.create_dataset(column.name, shape=array.shape, dtype=dtype, **options)
    if len(array):
        dataset[...] = array.view(dtype)  # same bytes; h5py converts between equal types only
    if column.unit:
        dataset.attrs["unit"] = np.bytes_(column.unit)


def _attribute(name: str, value: str | int | float) -> Any:
    """Fixed-length text: variable-length strings live in a heap that old readers trip over."""
    if not isinstance(value, str):
        return value
    data = value.encode()
    if len(data) > _MAX_ATTRIBUTE_BYTES:
        raise StoreError(
            f"the rollout store's attribute {name!r} has {len(data)} bytes; at most "
            f"{_MAX_ATTRIBUTE_BYTES} fit, put it in a file of the run folder instead"
        )
    return np.bytes_(data or b" ")


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
