"""Checksums of a file's columns and attributes, and the attribute that holds them.

`checksums` is a line of `path=digits` with an entry for every column, in whatever form HDF5 keeps
it, and at its end `@attributes=digits` for all attributes together. HDF5's own metadata (which
columns there are, where they lie, of what type) has no checksum in the format that every version
reads; when it is damaged, a column is missing, or its bytes are others.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, unquote

from llamarl_hpc.storage.rollout_store.layout import Block
from llamarl_hpc.storage.rollout_store.template import bytes_of
from llamarl_hpc.types import Array

ATTRIBUTE = "checksums"
_OTHERS = "@attributes"
_PADDING = " \n\0"  # which a text may lose or gain in the file


def checksum(array: Array) -> str:
    """XXH3, 64 bits, of the bytes as they lie in memory; 16 hexadecimal digits."""
    import xxhash

    return xxhash.xxh3_64_hexdigest(bytes_of(array))


def checksums(block: Block, attributes: Mapping[str, str | int | float]) -> str:
    """The attribute's text, for a file with these columns and all its other attributes."""
    columns = " ".join(f"{quote(path)}={checksum(array)}" for path, array in block.items())
    return f"{columns} {_OTHERS}={_of_attributes(attributes, columns)}"


def parsed(text: str) -> dict[str, str]:
    """Digits by path of column."""
    entries = (entry.rpartition("=") for entry in text.split())
    return {unquote(path): digits for path, _, digits in entries}


def are_as_written(attributes: Mapping[str, str | int | float]) -> bool:
    """Whether a file's attributes are those that it was given, this one included."""
    columns, _, digits = str(attributes.get(ATTRIBUTE, "")).rpartition(f" {_OTHERS}=")
    return digits == _of_attributes(attributes, columns)


def _of_attributes(attributes: Mapping[str, str | int | float], columns: str) -> str:
    import xxhash

    values = {**attributes, ATTRIBUTE: columns}
    lines = (
        f"{name}={value.strip(_PADDING) if isinstance(value, str) else value!r}\n"
        for name, value in sorted(values.items())
    )
    return xxhash.xxh3_64_hexdigest("".join(lines).encode())
