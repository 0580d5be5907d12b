"""Compression filters: what each writes, and what a reader needs that HDF5 itself does not have.

`gzip` is in every HDF5, `lzf` in every h5py. `zstd` and `blosc2` come with the package hdf5plugin
and are faster at the same size; whoever reads such files needs it, too, and it is imported only
then.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from llamarl_hpc.errors import ConfigError, StoreError

PLUGINS = {"zstd": 32015, "blosc2": 32026}  # ids of the filters, as registered with the HDF Group
_INSTALL = "pip install hdf5plugin"


class MissingFilterError(StoreError):
    """A file is whole, but cannot be read here."""


def check_available(compression: str) -> None:
    """Raise ConfigError when nothing here can write this compression."""
    if compression in PLUGINS and find_spec("hdf5plugin") is None:
        raise ConfigError(
            f"storage.compression is {compression} but hdf5plugin is not installed; {_INSTALL}, "
            "or set it to gzip"
        )


def dataset_options(compression: str) -> dict[str, Any]:
    """Arguments of h5py's `create_dataset` for this compression; shuffle is part of them."""
    if compression == "gzip":
        return {"compression": "gzip", "compression_opts": 1, "shuffle": True}
    if compression == "lzf":
        return {"compression": "lzf", "shuffle": True}
    if compression == "zstd":
        return {"shuffle": True, **import_module("hdf5plugin").Zstd(clevel=3)}
    if compression == "blosc2":
        plugin = import_module("hdf5plugin")
        return dict(plugin.Blosc2(cname="zstd", clevel=3, filters=plugin.Blosc2.SHUFFLE))
    return {"shuffle": False}


def load_filters(dataset: Any, name: str) -> bool:
    """Make the filters of a dataset (h5py's low-level one) known to HDF5; whether that was needed.
    `name` is the file's.

    Raises MissingFilterError when one cannot be had.
    """
    from h5py import h5z

    missing = [number for number in _filters(dataset) if not h5z.filter_avail(number)]
    if not missing:
        return False
    if find_spec("hdf5plugin") is not None:
        import_module("hdf5plugin")
        missing = [number for number in missing if not h5z.filter_avail(number)]
    if missing:
        names = {number: name for name, number in PLUGINS.items()}
        what = ", ".join(names.get(number, f"filter {number}") for number in missing)
        raise MissingFilterError(
            f"{name} is compressed with {what}, which this HDF5 does not have; {_INSTALL}"
        )
    return True


def _filters(dataset: Any) -> list[int]:
    creation = dataset.get_create_plist()
    return [creation.get_filter(index)[0] for index in range(creation.get_nfilters())]
