"""Reading HDF5: low-level calls of h5py, which is imported when first used.

A run has thousands of files, and a look at one takes a fifth so long as with h5py's File.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from llamarl_hpc.types import Array

H5_ERRORS = (OSError, ValueError, RuntimeError, KeyError, TypeError)
"""What a damaged file may raise: h5py has no error of its own."""


def open_file(source: Path | bytes) -> Any:
    """h5py's FileID, for reading; of a file that lies in memory or under a path."""
    from h5py import h5f, h5p

    if isinstance(source, bytes):
        return h5f.open_file_image(source)
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    # Files never change once they have their name, so there is nothing to lock.
    access.set_file_locking(False, True)
    return h5f.open(os.fsencode(source), h5f.ACC_RDONLY, fapl=access)


def attributes(file: Any) -> dict[str, Any]:
    """Texts and numbers, by name."""
    from h5py import h5a

    found: dict[str, Any] = {}
    for index in range(h5a.get_num_attrs(file)):
        attribute = h5a.open(file, index=index)
        array = np.empty(attribute.shape, attribute.dtype)
        attribute.read(array)
        value = array.item()
        if isinstance(value, bytes):  # most files of a run say the same
            value = sys.intern(value.decode().strip(" "))
        found[attribute.name.decode()] = value
    return found


def names(file: Any, group: str) -> list[str]:
    """What is in a group; nothing where there is no such group."""
    import h5py

    try:
        return list(h5py.Group(h5py.h5g.open(file, group.encode())))
    except KeyError:
        return []


def has(file: Any, path: str) -> bool:
    """Whether there is such a dataset, sound or damaged."""
    try:
        dataset(file, path)
    except KeyError:
        return False
    except H5_ERRORS:
        return True
    return True


def dataset(file: Any, path: str) -> Any:
    """h5py's DatasetID."""
    from h5py import h5d

    return h5d.open(file, path.encode())


def rows(dataset: Any, start: int, stop: int) -> Array:
    """Rows start..stop. Raises ValueError for rows outside of it, and where a chunk is missing:
    HDF5 takes it for zeros."""
    from h5py import h5s

    if not 0 <= start <= stop <= dataset.shape[0]:
        raise ValueError(f"it has {dataset.shape[0]} rows, not {start} to {stop}")
    array = np.empty(stop - start, dtype=dataset.dtype)
    if not len(array):
        return array
    if step := chunk_rows(dataset):
        for first in range(start - start % step, stop, step):
            if dataset.get_chunk_info_by_coord((first,)).byte_offset is None:
                raise ValueError(f"its chunk at row {first} is missing")
    space = dataset.get_space()
    space.select_hyperslab((start,), (len(array),))
    dataset.read(h5s.create_simple(array.shape), space, array, mtype=dataset.get_type())
    return array


def chunk_rows(dataset: Any) -> int:
    """Rows of a chunk; 0 where there are none."""
    from h5py import h5d

    creation = dataset.get_create_plist()
    return int(creation.get_chunk()[0]) if creation.get_layout() == h5d.CHUNKED else 0
