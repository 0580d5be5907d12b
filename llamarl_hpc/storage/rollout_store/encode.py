"""One HDF5 file of the store, made in memory.

Columns without a filter go through h5py's low-level calls: a file has about 60 datasets, and at
0.3 ms each the convenient ones would take longer than the disk.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import cache
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
    Column,
    column_of,
)
from llamarl_hpc.types import Array

CHUNK_ROWS = 32_768  # 128 to 256 KiB: one rollout is read with one chunk of each column
CONTIGUOUS_BYTES = 4096  # smaller columns are cheaper without chunk index and filters
_WRITE_ROWS = 16 * CHUNK_ROWS  # at a time: h5py lets nobody else in meanwhile
_HEADER_BYTES = 1 << 17  # what HDF5 itself takes of a file
_MAX_ATTRIBUTE_BYTES = 32_768  # an object header message of HDF5's oldest format holds 64 KiB

Attributes = Mapping[str, str | int | float]


def encode(block: Block, attributes: Attributes, *, compression: str = "none") -> bytes:
    """The HDF5 file that holds `block`, readable by HDF5 1.8 and later.

    With a compression ("gzip", "lzf"), or "checksum" for none, columns are chunked and every chunk
    carries a checksum. Columns that are not chunked have theirs in the file's attribute
    `checksums`. Raises StoreError for an attribute that is too long.
    """
    import h5py

    own: dict[str, str | int | float] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "format_minor": FORMAT_MINOR,
        "table_rows": " ".join(f"{t}={blocks.num_rows(block, t)}" for t in TABLES),
    }
    chunked = {path for path, array in block.items() if _is_chunked(array, compression)}
    own["checksums"] = " ".join(
        f"{path}={checksum(array)}" for path, array in block.items() if path not in chunked
    )
    with _new_file(blocks.num_bytes(block)) as file:
        for name, value in (dict(attributes) | own).items():
            _write_attribute(file.id, name, value)
        groups = {table: file.create_group(table) for table in (*TABLES, "rewards")}
        space = _Plain(h5py)
        for path, array in block.items():
            column = column_of(path)
            group = groups[path.split("/")[0]]
            if path in chunked:
                dataset = _write_chunked(group, column, array, compression)
            else:
                dataset = space.write(group.id, column, array)
            if column.unit:
                _write_attribute(dataset, "unit", column.unit)
        file.flush()
        image: bytes = file.id.get_file_image()
    return image


def checksum(array: Array) -> str:
    """XXH3, 64 bits, of the bytes as they lie in the file; 16 hexadecimal digits."""
    import xxhash

    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(array).view(np.uint8).data)


def _new_file(num_bytes: int) -> Any:
    import h5py

    return h5py.File(
        f"rollouts-{secrets.token_hex(8)}",  # HDF5 takes files of one name in a process for one
        "w",
        driver="core",
        backing_store=False,
        block_size=num_bytes + _HEADER_BYTES,  # grows once
        libver=("earliest", "v108"),
    )


def _is_chunked(array: Array, compression: str) -> bool:
    return compression != "none" and array.nbytes > CONTIGUOUS_BYTES


class _Plain:
    """Writes contiguous columns; their space is not filled before it is written."""

    def __init__(self, h5py: Any) -> None:
        self._h5py = h5py
        self._creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        self._creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)

    def write(self, group: Any, column: Column, array: Array) -> Any:
        h5d, h5s = self._h5py.h5d, self._h5py.h5s
        kind = _file_type(column.path, array.dtype.itemsize)
        shape = h5s.create_simple(array.shape)
        dataset = h5d.create(group, column.name.encode(), kind, shape, self._creation)
        if len(array):
            dataset.write(h5s.ALL, h5s.ALL, np.ascontiguousarray(array), mtype=kind)
        return dataset


def _write_chunked(group: Any, column: Column, array: Array, compression: str) -> Any:
    options: dict[str, Any] = {
        "chunks": (min(len(array), CHUNK_ROWS),),
        "fletcher32": True,
        "shuffle": compression != "checksum",
    }
    if compression == "gzip":
        options |= {"compression": "gzip", "compression_opts": 1}
    elif compression == "lzf":
        options["compression"] = "lzf"
    dtype = _dtype(column, array.dtype.itemsize)
    dataset = group.create_dataset(column.name, shape=array.shape, dtype=dtype, **options)
    values = array.view(dtype)  # same bytes; h5py converts between equal types only
    for start in range(0, len(array), _WRITE_ROWS):
        dataset[start : start + _WRITE_ROWS] = values[start : start + _WRITE_ROWS]
    return dataset.id


def _dtype(column: Column, itemsize: int) -> np.dtype[Any]:
    import h5py

    if column.enum:
        dtype = h5py.enum_dtype(column.enum, basetype=column.dtype)
    elif column.dtype == "S":
        dtype = h5py.string_dtype("utf-8", itemsize)
    else:
        dtype = np.dtype(column.dtype)
    return dtype  # type: ignore[no-any-return]


@cache
def _file_type(path: str, itemsize: int) -> Any:
    """HDF5's type of a column; made once, for making it takes as long as writing with it."""
    import h5py

    return h5py.h5t.py_create(_dtype(column_of(path), itemsize), logical=True)


def _write_attribute(owner: Any, name: str, value: str | int | float) -> None:
    """Fixed-length text: variable-length strings live in a heap that old readers trip over."""
    import h5py

    data = np.asarray(_attribute(name, value))
    kind, space = _attribute_type(data.dtype.str)
    h5py.h5a.create(owner, name.encode(), kind, space).write(data, mtype=kind)


@cache
def _attribute_type(dtype: str) -> tuple[Any, Any]:
    import h5py

    return h5py.h5t.py_create(np.dtype(dtype)), h5py.h5s.create(h5py.h5s.SCALAR)


def _attribute(name: str, value: str | int | float) -> Any:
    if not isinstance(value, str):
        return value
    data = value.encode()
    if len(data) > _MAX_ATTRIBUTE_BYTES:
        raise StoreError(
            f"the rollout store's attribute {name!r} has {len(data)} bytes; at most "
            f"{_MAX_ATTRIBUTE_BYTES} fit, put it in a file of the run folder instead"
        )
    return np.bytes_(data or b" ")
