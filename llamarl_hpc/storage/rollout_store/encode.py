"""One HDF5 file of the store, made in memory.

A file has about 60 datasets, and most files are the parts that a step waits for. So of columns
without a filter HDF5 makes only the metadata, once for all files that are alike (`template`); the
columns themselves are written from where they are.
"""

from __future__ import annotations

import io
import json
import secrets
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from llamarl_hpc.errors import StoreError
from llamarl_hpc.storage.atomic import Buffer
from llamarl_hpc.storage.rollout_store import blocks, checksums
from llamarl_hpc.storage.rollout_store.filters import dataset_options
from llamarl_hpc.storage.rollout_store.layout import (
    FORMAT,
    FORMAT_MINOR,
    FORMAT_VERSION,
    TABLES,
    Block,
    Column,
    column_of,
)
from llamarl_hpc.storage.rollout_store.template import (
    Shapes,
    Template,
    bytes_of,
    make_template,
    text_width,
)
from llamarl_hpc.types import Array

CHUNK_ROWS = 16_384  # 64 to 128 KiB: one rollout is read with one chunk of each column
CONTIGUOUS_BYTES = 4096  # smaller columns are cheaper without chunk index and filters
_WRITE_ROWS = 16 * CHUNK_ROWS  # at a time: h5py lets nobody else in meanwhile
_LIBVER = ("earliest", "v108")
_TEXT_STEP = 16  # bytes
_MAX_TEMPLATES = 64
MAX_ATTRIBUTE_BYTES = 32_768  # an object header message of HDF5's oldest format holds 64 KiB

_templates: dict[Any, Template | None] = {}

Attributes = Mapping[str, str | int | float]
Image = list[Buffer]
"""A file: buffers end to end. Columns in it are not copies, so they must not change."""


def encode(block: Block, attributes: Attributes, *, compression: str = "none") -> Image:
    """The HDF5 file that holds `block`, readable by HDF5 1.8 and later.

    With a compression (`filters`), or "checksum" for none, columns are chunked and every chunk
    carries a checksum of its own, beside that of the column (`checksums`). Raises StoreError for
    an attribute that is too long.
    """
    block = {path: _widened(array) for path, array in block.items()}
    chunked = {path for path, array in block.items() if _is_chunked(array, compression)}
    own: dict[str, str | int | float] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "format_minor": FORMAT_MINOR,
        "table_rows": " ".join(f"{t}={blocks.num_rows(block, t)}" for t in TABLES),
        "rewards": json.dumps([p.split("/")[1] for p in block if p.startswith("rewards/")]),
    }
    attributes = dict(attributes) | own
    attributes[checksums.ATTRIBUTE] = checksums.checksums(block, attributes)
    for name, value in attributes.items():
        _attribute(name, value)  # refuses what is too long
    if compression == "none":
        return _encode_plain(block, attributes)
    return [_encode_chunked(block, attributes, chunked, compression)]


def _encode_plain(block: Block, attributes: Attributes) -> Image:
    template = _template(block, attributes)
    if template is not None:
        return template.image(block, attributes)
    placed: list[tuple[int, Array]] = []
    sink = _Sink()
    with _laid_out(sink, attributes) as groups:
        writer = _Plain(early=True)
        for path, array in block.items():
            group = groups[path.split("/")[0]]
            dataset = writer.create(group, path, array.dtype.itemsize, len(array))
            if len(array):
                placed.append((dataset.get_offset(), array))
    return sink.image(placed)


@contextmanager
def _laid_out(sink: _Sink, attributes: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    import h5py

    with h5py.File(sink, "w", libver=_LIBVER) as file:
        yield _write_header(file, attributes)


def _template(block: Block, attributes: Attributes) -> Template | None:
    """That of files with these columns and attributes; made when it is first needed."""
    widths = tuple(
        (name, text_width(value) if isinstance(value, str) else type(value).__name__)
        for name, value in attributes.items()
    )
    row_bytes = {path: array.dtype.itemsize for path, array in block.items()}
    key = (tuple(row_bytes.items()), widths)
    if key not in _templates:
        if len(_templates) >= _MAX_TEMPLATES:
            _templates.clear()
        _templates[key] = make_template(row_bytes, attributes, _lay_out, _read_back)
    return _templates[key]


def _lay_out(shapes: Shapes, attributes: Mapping[str, Any]) -> bytes:
    """A file whose columns have no place yet."""
    sink = _Sink()
    with _laid_out(sink, attributes) as groups:
        writer = _Plain(early=False)
        for path, row_bytes, rows in shapes:
            writer.create(groups[path.split("/")[0]], path, row_bytes, rows)
    return b"".join(sink.image([]))


def _read_back(image: bytes) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Bytes of all columns, and the attributes."""
    import h5py

    with h5py.File(io.BytesIO(image), "r") as file:
        columns = {
            f"{table}/{name}": dataset[()].tobytes()
            for table, group in file.items()
            for name, dataset in group.items()
        }
        values = {
            name: value.decode().strip(" ") if isinstance(value, bytes) else value
            for name, value in file.attrs.items()
        }
    return columns, values


def _encode_chunked(
    block: Block, attributes: Attributes, chunked: set[str], compression: str
) -> bytes:
    import h5py

    with h5py.File(
        f"rollouts-{secrets.token_hex(8)}",  # HDF5 takes files of one name in a process for one
        "w",
        driver="core",
        backing_store=False,
        block_size=max(1 << 16, blocks.num_bytes(block) // 8),
        libver=_LIBVER,
    ) as file:
        groups = _write_header(file, attributes)
        writer = _Plain(early=True)
        for path, array in block.items():
            group = groups[path.split("/")[0]]
            if path in chunked:
                _write_chunked(group, column_of(path), array, compression)
            else:
                writer.write(group, path, array)
        file.flush()
        image: bytes = file.id.get_file_image()
    return image


def _write_header(file: Any, attributes: Attributes) -> dict[str, Any]:
    """Attributes and the groups, by table."""
    for name, value in attributes.items():
        _write_attribute(file.id, name, value)
    return {table: file.create_group(table) for table in (*TABLES, "rewards")}


class _Sink:
    """What HDF5 writes when it lays out a file: small pieces between the columns.

    A file object to h5py, which is written and never read.
    """

    def __init__(self) -> None:
        self._position = 0
        self._size = 0
        self._pieces: list[tuple[int, bytes]] = []

    def seek(self, position: int, whence: int = 0) -> int:
        self._position = (0, self._position, self._size)[whence] + position
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        raise OSError(f"{size} bytes of a file that is being laid out were read")

    def readinto(self, buffer: Any) -> int:
        raise OSError(f"{len(buffer)} bytes of a file that is being laid out were read")

    def write(self, data: Any) -> int:
        self._pieces.append((self._position, bytes(data)))
        self._position += len(data)
        self._size = max(self._size, self._position)
        return len(data)

    def truncate(self, size: int) -> int:
        self._size = size
        return size

    def flush(self) -> None:
        """Nothing is held back."""

    def image(self, placed: list[tuple[int, Array]]) -> Image:
        """The whole file: the columns at their offsets, the pieces in the gaps between them."""
        starts, gaps, image = [], list[bytearray](), list[Buffer]()
        end = 0
        for offset, array in [*sorted(placed, key=lambda p: p[0]), (self._size, None)]:
            assert offset >= end, "columns overlap"
            starts.append(end)
            gaps.append(bytearray(offset - end))
            image.append(gaps[-1])
            if array is not None:
                image.append(bytes_of(array))
                end = offset + array.nbytes
        for position, data in self._pieces:  # in order: the last word counts
            gap = bisect_right(starts, position) - 1
            at = position - starts[gap]
            assert at + len(data) <= len(gaps[gap]), "HDF5 wrote into a column"
            gaps[gap][at : at + len(data)] = data
        return image


def _widened(array: Array) -> Array:
    """Texts in steps of width, so that files are alike."""
    if array.dtype.kind != "S":
        return array
    width = -(-array.dtype.itemsize // _TEXT_STEP) * _TEXT_STEP
    return array.astype(f"S{width}", copy=False)


def _is_chunked(array: Array, compression: str) -> bool:
    return compression != "none" and array.nbytes > CONTIGUOUS_BYTES


class _Plain:
    """Contiguous columns, not filled before they are written; `early` gives each its place."""

    def __init__(self, *, early: bool) -> None:
        from h5py import h5d, h5p, h5s

        self._h5d, self._h5s = h5d, h5s
        self._creation = h5p.create(h5p.DATASET_CREATE)
        self._creation.set_fill_time(h5d.FILL_TIME_NEVER)
        self._creation.set_alloc_time(h5d.ALLOC_TIME_EARLY if early else h5d.ALLOC_TIME_LATE)

    def create(self, group: Any, path: str, row_bytes: int, rows: int) -> Any:
        """The dataset, without its data."""
        column = column_of(path)
        kind, shape = _file_type(path, row_bytes), self._h5s.create_simple((rows,))
        dataset = self._h5d.create(group.id, column.name.encode(), kind, shape, self._creation)
        if column.unit:
            _write_attribute(dataset, "unit", column.unit)
        return dataset

    def write(self, group: Any, path: str, array: Array) -> None:
        dataset = self.create(group, path, array.dtype.itemsize, len(array))
        if len(array):
            kind, everything = _file_type(path, array.dtype.itemsize), self._h5s.ALL
            dataset.write(everything, everything, np.ascontiguousarray(array), mtype=kind)


def _write_chunked(group: Any, column: Column, array: Array, compression: str) -> None:
    options: dict[str, Any] = {
        "chunks": (min(len(array), CHUNK_ROWS),),
        "fletcher32": True,
        **dataset_options(compression),
    }
    dtype = _dtype(column, array.dtype.itemsize)
    dataset = group.create_dataset(column.name, shape=array.shape, dtype=dtype, **options)
    values = array.view(dtype)  # same bytes; h5py converts between equal types only
    for start in range(0, len(array), _WRITE_ROWS):
        dataset[start : start + _WRITE_ROWS] = values[start : start + _WRITE_ROWS]
    if column.unit:
        _write_attribute(dataset.id, "unit", column.unit)


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


def _write_attribute(owner: Any, name: str, value: str | int | float | bytes) -> None:
    """Fixed-length text: variable-length strings live in a heap that old readers trip over."""
    import h5py

    data = np.asarray(_attribute(name, value))
    kind, space = _attribute_type(data.dtype.str)
    h5py.h5a.create(owner, name.encode(), kind, space).write(data, mtype=kind)


@cache
def _attribute_type(dtype: str) -> tuple[Any, Any]:
    import h5py

    return h5py.h5t.py_create(np.dtype(dtype)), h5py.h5s.create(h5py.h5s.SCALAR)


def _attribute(name: str, value: str | int | float | bytes) -> Any:
    if not isinstance(value, str):
        return value
    data = value.encode()
    if len(data) > MAX_ATTRIBUTE_BYTES:
        raise StoreError(
            f"the rollout store's attribute {name!r} has {len(data)} bytes; at most "
            f"{MAX_ATTRIBUTE_BYTES} fit, put it in a file of the run folder instead"
        )
    return np.bytes_(data or b" ")
