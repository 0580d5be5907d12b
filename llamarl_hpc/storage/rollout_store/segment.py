"""A segment while it is written: its number, its parts, when it is full, the files it becomes."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from llamarl_hpc.storage.rollout_store import blocks
from llamarl_hpc.storage.rollout_store.encode import Attributes, Image, encode
from llamarl_hpc.storage.rollout_store.layout import Block
from llamarl_hpc.storage.rollout_store.names import open_path, segment_numbers, segment_path

if TYPE_CHECKING:
    from llamarl_hpc.config.schema import StorageConfig

MAX_PARTS = 64  # of an open segment; bounds the number of files a reader must open
DIRECT_SHARE = 32  # uncompressed, a flush of 1/32 segment is closed at once: not written twice


@dataclass
class OpenSegment:
    """What the parts of a segment hold until they are joined."""

    number: int
    blocks: list[Block] = field(default_factory=list)
    num_rollouts: int = 0
    num_bytes: int = 0

    def add(self, block: Block) -> None:
        self.blocks.append(block)
        self.num_rollouts += blocks.num_rows(block, "rollouts")
        self.num_bytes += blocks.num_bytes(block)

    def is_full(self, config: StorageConfig) -> bool:
        return (
            self.num_rollouts >= config.segment_rollouts
            or self.num_bytes >= max_bytes(config)
            or len(self.blocks) >= MAX_PARTS
        )


def max_bytes(config: StorageConfig) -> int:
    """Of a segment before compression."""
    return config.segment_mb << 20


def is_direct(block: Block, config: StorageConfig) -> bool:
    """Whether a flush becomes a closed segment of its own."""
    large = blocks.num_bytes(block) >= max_bytes(config) // DIRECT_SHARE
    return large and config.compression == "none"


def part_image(segment: OpenSegment, block: Block, attributes: Attributes) -> Image:
    """The segment's next part. Never compressed: a step waits for it."""
    own = _own_attributes(segment.number, len(segment.blocks), block)
    return encode(block, {**attributes, **own})


def closed_image(number: int, block: Block, attributes: Attributes, compression: str) -> Image:
    """A closed segment, compressed in this way."""
    own = _own_attributes(number, -1, block)
    return encode(block, {**attributes, **own}, compression=compression)


def joined_compression(config: StorageConfig) -> str:
    """Of segments that are made from parts: nobody waits for them, so chunks have checksums."""
    return "checksum" if config.compression == "none" else config.compression


def _own_attributes(number: int, part: int, block: Block) -> Attributes:
    ids = block["rollouts/rollout_id"]
    return {
        "segment": number,
        "part": part,
        "first_rollout_id": int(ids[0]) if len(ids) else -1,
        "num_rollouts": len(ids),
        "t_written": time.time(),
    }


def claim(folder: Path, last: int) -> int:
    """A number above `last` (-1: above all there are) that no writer has.

    Making the folder of its parts is the claim: only one can.
    """
    number = last if last >= 0 else max(segment_numbers(folder), default=-1)
    while True:
        number += 1
        opened = open_path(folder, number)
        try:
            opened.mkdir()
        except FileExistsError:
            continue
        if not segment_path(folder, number).exists():
            return number
        opened.rmdir()


def remove_parts(opened: Path) -> None:
    """The folder of a segment that has been closed; empty when it never had parts."""
    try:
        opened.rmdir()
    except OSError:
        shutil.rmtree(opened, ignore_errors=True)
