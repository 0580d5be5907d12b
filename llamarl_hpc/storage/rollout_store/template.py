"""The metadata of a file, laid out by HDF5 once and filled in for every file of the same columns.

Files of one run have the same columns and attributes; only the number of rows, where each column
lies, and the values of attributes differ. Laying them out anew takes HDF5 longer than the disk
takes for the data. So a file with columns of made-up lengths is laid out, the made-up numbers are
looked up in it, and in a copy they are replaced by the true ones; the columns follow behind.

Nothing is taken on trust: every number must be found where it belongs and nowhere else, and a
template is used only after h5py has read a file made from it and found what was put in. Otherwise
there is none, and HDF5 lays out each file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamarl_hpc.storage.atomic import Buffer
from llamarl_hpc.types import Array

Value = str | int | float
Shapes = Sequence[tuple[str, int, int]]
"""(path, bytes of a row, rows) of each column."""

_UNDEFINED = b"\xff" * 8  # HDF5's address of a column that has no place yet
_END_OF_FILE = 40  # where the superblock, version 0, says how long the file is
_ALIGNMENT = 8
_TEXT_STEP = 64  # texts of attributes are padded to multiples, so that one template serves many
_CHECK_ROWS = 3


@dataclass(frozen=True, slots=True)
class Template:
    """Metadata with the positions of what is to be filled in."""

    metadata: bytes
    layouts: dict[str, int]  # of address and size of a column, 8 bytes each
    lengths: dict[str, list[int]]  # of its number of rows, and the most that it may have
    attributes: dict[str, tuple[int, int]]  # position and bytes

    def image(self, columns: Mapping[str, Array], attributes: Mapping[str, Value]) -> list[Buffer]:
        """The file with these columns (of the template's row sizes) and attributes."""
        metadata = bytearray(self.metadata)
        for name, value in attributes.items():
            start, width = self.attributes[name]
            metadata[start : start + width] = _value_bytes(value, width)
        image: list[Buffer] = [metadata]
        end = len(metadata)
        for path, array in columns.items():
            size = array.nbytes
            address = struct.pack("<Q", end) if size else _UNDEFINED
            at = self.layouts[path]
            metadata[at : at + 16] = address + struct.pack("<Q", size)
            for at in self.lengths[path]:
                struct.pack_into("<Q", metadata, at, len(array))
            image += [bytes_of(array), bytes(-size % _ALIGNMENT)]
            end += size + -size % _ALIGNMENT
        struct.pack_into("<Q", metadata, _END_OF_FILE, end)
        return image


def text_width(text: str) -> int:
    """Bytes that an attribute's text takes in a template."""
    return max(_TEXT_STEP, -(-len(text.encode()) // _TEXT_STEP) * _TEXT_STEP)


def make_template(
    row_bytes: Mapping[str, int],
    attributes: Mapping[str, Value],
    lay_out: Callable[[Shapes, Mapping[str, Value | bytes]], bytes],
    read: Callable[[bytes], tuple[dict[str, bytes], dict[str, Any]]],
) -> Template | None:
    """A template for columns of these row sizes; None when it cannot be relied on.

    `lay_out` gives the metadata of a file whose columns have no place yet, `read` the bytes of all
    columns and the attributes of a file.
    """
    # Odd and large: no such number is in a file by chance, and no size equals another's length.
    shapes = [
        (path, size, (1 << 33) + 2 * i + 1) for i, (path, size) in enumerate(row_bytes.items())
    ]
    marks = {name: _mark(i, value) for i, (name, value) in enumerate(attributes.items())}
    metadata = lay_out(shapes, marks)
    if metadata[_END_OF_FILE : _END_OF_FILE + 8] != struct.pack("<Q", len(metadata)):
        return None
    template = _located(metadata, shapes, marks)
    return template if template and _reads_back(template, row_bytes, attributes, read) else None


def _mark(index: int, value: Value) -> Value | bytes:
    if isinstance(value, str):
        return (f"<mark {index:06d}>" * (text_width(value) // 8)).encode()[: text_width(value)]
    number = 0x5EED_0000_0000 + index
    return float(number) if isinstance(value, float) else number


def _located(
    metadata: bytes, shapes: Shapes, marks: Mapping[str, Value | bytes]
) -> Template | None:
    layouts, lengths = dict[str, int](), dict[str, list[int]]()
    attributes = dict[str, tuple[int, int]]()
    for path, size, rows in shapes:
        layout = _all(metadata, _UNDEFINED + struct.pack("<Q", rows * size))
        if len(layout) != 1:
            return None
        length = [at for at in _all(metadata, struct.pack("<Q", rows)) if at != layout[0] + 8]
        if len(length) != 2 or length[1] != length[0] + 8:
            return None
        layouts[path], lengths[path] = layout[0], length
    for name, mark in marks.items():
        data = mark if isinstance(mark, bytes) else _value_bytes(mark, 8)
        places = _all(metadata, data)
        if len(places) != 1:
            return None
        attributes[name] = places[0], len(data)
    return Template(metadata, layouts, lengths, attributes)


def _reads_back(
    template: Template,
    row_bytes: Mapping[str, int],
    attributes: Mapping[str, Value],
    read: Callable[[bytes], tuple[dict[str, bytes], dict[str, Any]]],
) -> bool:
    columns = {
        path: np.frombuffer(bytes((i + k) % 251 for k in range(size * rows)), dtype=f"V{size}")
        for i, (path, size) in enumerate(row_bytes.items())
        for rows in [_CHECK_ROWS if i % 5 else 0]  # some are empty
    }
    try:
        stored, said = read(b"".join(template.image(columns, attributes)))
    except (OSError, ValueError, RuntimeError, KeyError):
        return False
    return stored == {p: a.tobytes() for p, a in columns.items()} and said == dict(attributes)


def _value_bytes(value: Value, width: int) -> bytes:
    if isinstance(value, str):
        return (value.encode() or b" ").ljust(width, b"\0")
    return struct.pack("<d" if isinstance(value, float) else "<q", value)


def _all(data: bytes, wanted: bytes) -> list[int]:
    found, at = [], data.find(wanted)
    while at >= 0:
        found.append(at)
        at = data.find(wanted, at + 1)
    return found


def bytes_of(array: Array) -> memoryview:
    """As they lie in memory."""
    return np.ascontiguousarray(array).view(np.uint8).data
