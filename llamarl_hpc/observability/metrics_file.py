"""`metrics.jsonl`: one object for each optimizer step, and one for each evaluation or event."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from llamarl_hpc.observability.json_lines import JsonLinesFile


class MetricsFile:
    """Appends to the metrics of a run, over attempts: lines are never changed or removed.

    A later attempt writes steps again that an earlier one had done after its last checkpoint;
    readers keep the last attempt's (`analysis/lineage.py`).
    """

    def __init__(self, path: Path, *, attempt: int) -> None:
        self._file = JsonLinesFile(path)
        self._attempt = attempt

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of optimizer step `step` (from 0), which made policy version `step + 1`."""
        self._append({"step": step, "policy_version": step + 1}, metrics)

    def event(self, event: str, *, policy_version: int, metrics: Mapping[str, float]) -> None:
        """Something that happened at a policy version, for example `eval`."""
        self._append({"event": event, "policy_version": policy_version}, metrics)

    def close(self) -> None:
        self._file.close()

    def _append(self, head: Mapping[str, object], metrics: Mapping[str, float]) -> None:
        self._file.append({**head, "attempt": self._attempt, "time": time.time(), **metrics})
