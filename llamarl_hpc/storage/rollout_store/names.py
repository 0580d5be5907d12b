"""Names in the folder of the rollout store; the package says what they stand for."""

from __future__ import annotations

import re
from pathlib import Path

_SEGMENT = re.compile(r"segment_(\d+)\.(h5|open)")


def segment_path(folder: Path, number: int) -> Path:
    """A closed segment."""
    return folder / f"segment_{number:06d}.h5"


def open_path(folder: Path, number: int) -> Path:
    """The folder of an open segment's parts."""
    return folder / f"segment_{number:06d}.open"


def part_path(opened: Path, part: int) -> Path:
    """A file of an open segment: one flush."""
    return opened / f"part_{part:06d}.h5"


def part_paths(opened: Path) -> list[Path]:
    return sorted(opened.glob("part_*.h5"))


def segment_numbers(folder: Path) -> dict[int, bool]:
    """Segments there are, in order; True where it is closed. Other names are passed over."""
    # Open ones first: a segment that is closed between the two looks is then seen twice, not never.
    opened = dict.fromkeys(_numbers(folder, "segment_*.open"), False)
    closed = dict.fromkeys(_numbers(folder, "segment_*.h5"), True)
    return dict(sorted((opened | closed).items()))


def _numbers(folder: Path, pattern: str) -> list[int]:
    matches = (_SEGMENT.fullmatch(path.name) for path in folder.glob(pattern))
    return [int(match[1]) for match in matches if match]
