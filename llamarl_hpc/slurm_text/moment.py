"""Points in time as Slurm prints them: `2026-12-01T03:36:30`, in the zone of this machine."""

from __future__ import annotations

import time


def parse_moment(text: str) -> float | None:
    """Seconds of the epoch; None for what is not known yet (N/A, Unknown, NONE, empty)."""
    try:
        return time.mktime(time.strptime(text.strip(), "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None
