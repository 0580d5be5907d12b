"""Try HDF5's file locks in a folder: `python -m llamarl_hpc.storage.hdf5_lock FOLDER`.

A program of its own, because a bad file system may hang it for ever: whoever asks can kill it.
"""

from __future__ import annotations

import sys
from pathlib import Path


def try_lock(folder: Path) -> None:
    """Write a file and read it again, both locked. Raises OSError when the locks do not work."""
    import h5py

    path = folder / "lock.h5"
    with h5py.File(path, "w", locking=True) as file:
        file["x"] = [1, 2, 3]
    with h5py.File(path, "r", locking=True) as file:
        if list(file["x"]) != [1, 2, 3]:
            raise OSError(f"{path} reads back differently")


if __name__ == "__main__":
    try_lock(Path(sys.argv[1]))
