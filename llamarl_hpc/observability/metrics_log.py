"""Where the controller writes its figures: metrics.jsonl always, the others by config."""

from __future__ import annotations

from collections.abc import Mapping

from llamarl_hpc.config.schema import LoggingConfig
from llamarl_hpc.observability.metrics_file import MetricsFile
from llamarl_hpc.observability.tensorboard import TensorBoard
from llamarl_hpc.observability.trackers import make_trackers
from llamarl_hpc.run_dir import RunDir


class MetricsLog:
    """All books of figures of one attempt."""

    def __init__(self, run: RunDir, config: LoggingConfig, *, attempt: int) -> None:
        self._file = MetricsFile(run.metrics, attempt=attempt)
        self._board = TensorBoard(run.tensorboard, enabled=config.tensorboard)
        self._trackers = make_trackers(run, config)

    def step(self, step: int, *, policy_version: int, metrics: Mapping[str, float]) -> None:
        """Figures of optimizer step `step`, from 0; `policy_version` is the one it made."""
        self._file.step(step, {"policy_version": policy_version, **metrics})
        self._add(policy_version, metrics)

    def event(self, event: str, *, policy_version: int, metrics: Mapping[str, float]) -> None:
        self._file.event(event, policy_version=policy_version, metrics=metrics)
        self._add(policy_version, metrics)

    def _add(self, policy_version: int, metrics: Mapping[str, float]) -> None:
        self._board.add(policy_version, metrics)
        for tracker in self._trackers:
            tracker.add(policy_version, metrics)

    def close(self) -> None:
        """Idempotent."""
        self._file.close()
        self._board.close()
        for tracker in self._trackers:
            tracker.close()
        self._trackers = []
