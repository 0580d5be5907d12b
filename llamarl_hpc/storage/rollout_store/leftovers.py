"""Segments that killed attempts left open, closed by the next one before it writes."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarl_hpc.errors import StoreError
from llamarl_hpc.storage import atomic
from llamarl_hpc.storage.rollout_store import blocks
from llamarl_hpc.storage.rollout_store.file import RolloutFile
from llamarl_hpc.storage.rollout_store.layout import Block
from llamarl_hpc.storage.rollout_store.names import (
    open_path,
    part_paths,
    segment_numbers,
    segment_path,
)
from llamarl_hpc.storage.rollout_store.segment import closed_image, joined_compression

if TYPE_CHECKING:
    from llamarl_hpc.config.schema import StorageConfig

log = logging.getLogger(__name__)


def close_leftovers(folder: Path, *, attempt: int, config: StorageConfig) -> None:
    """Close what attempts before this one left open. A run is locked: they are over."""
    atomic.remove_leftovers(folder)
    for number, closed in segment_numbers(folder).items():
        if closed:
            shutil.rmtree(open_path(folder, number), ignore_errors=True)
            continue
        try:
            _close(folder, number, attempt, config)
        except StoreError as error:  # a damaged part must not keep a run from going on
            log.warning("segment %d of an earlier attempt stays open: %s", number, error)


def _close(folder: Path, number: int, attempt: int, config: StorageConfig) -> None:
    opened = open_path(folder, number)
    parts: list[Block] = []
    attributes: dict[str, Any] = {}
    for path in part_paths(opened):
        file = RolloutFile(path, path.name)
        attributes = file.attributes
        block, faults = file.checked_block()
        file.close()
        if faults:  # it must not get a new checksum
            raise StoreError("; ".join(faults))
        parts.append(block)
    if attributes.get("attempt", 0) >= attempt:
        return
    if parts:
        compression = joined_compression(config)
        image = closed_image(number, blocks.join(parts), attributes, compression)
        atomic.write_bytes(segment_path(folder, number), image)
    shutil.rmtree(opened, ignore_errors=True)  # without parts: claimed, and killed before a flush
