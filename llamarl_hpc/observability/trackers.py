"""Experiment trackers that write below the run folder, without a network: W&B and MLflow.

Both are optional packages, imported when they are switched on. A tracker gets what metrics.jsonl
gets. It must not cost the run anything: what it refuses is left out, and said once in the log.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Protocol

from llamarl_hpc.config.schema import LoggingConfig
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.run_dir import RunDir

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Scalars by step."""

    def add(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def make_trackers(run: RunDir, config: LoggingConfig) -> list[Tracker]:
    """Those that are switched on. Raises ConfigError when a package is missing."""
    trackers: list[Tracker] = []
    if config.wandb == "offline":
        trackers.append(WandbOffline(run, _imported("wandb", "logging.wandb", "wandb")))
    if config.mlflow:
        mlflow = _imported("mlflow", "logging.mlflow", "mlflow-skinny")
        trackers.append(MlflowFiles(run, mlflow))
    return trackers


def _imported(module: str, key: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{key} is on but the package {module} cannot be imported ({error}); install it "
            f"(pip install {package}), or switch {key} off"
        ) from error


class _Guarded:
    """Calls that may fail without consequence."""

    def __init__(self, name: str) -> None:
        self._name, self._has_warned = name, False

    def __call__(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # whatever a tracker of others raises, training goes on
            if not self._has_warned:
                log.warning("%s does not take figures, they are left out: %s", self._name, error)
            self._has_warned = True


class WandbOffline:
    """One offline W&B run per run folder; later attempts continue it under the same id."""

    def __init__(self, run: RunDir, wandb: Any) -> None:
        self._guarded = _Guarded("W&B")
        identity = str(run.read_info().get("run_id", run.path.name))
        folder = run.path / "wandb"
        folder.mkdir(exist_ok=True)  # else wandb writes elsewhere
        self._run = wandb.init(
            mode="offline",
            dir=str(run.path),
            id="".join(c if c.isalnum() or c in "-_" else "-" for c in identity),
            name=identity,
            project=run.path.parent.name,
            resume="allow",
            config=run.read_config(),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """W&B's own step must rise; a resume goes back, so the version is a figure of its own."""
        self._guarded(lambda: self._run.log({**_finite(metrics), "policy_version": step}))

    def close(self) -> None:
        self._guarded(self._run.finish)


class MlflowFiles:
    """One MLflow run per run folder, as plain files; later attempts continue it."""

    def __init__(self, run: RunDir, mlflow: Any) -> None:
        self._guarded = _Guarded("MLflow")
        self._entities = mlflow.entities
        folder = run.path / "mlflow"
        self._client = mlflow.tracking.MlflowClient(tracking_uri=folder.resolve().as_uri())
        known = folder / "run.json"
        if known.exists():
            self._id = str(json.loads(known.read_text())["run_id"])
            return
        name = run.path.parent.name
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        created = self._client.create_run(experiment, run_name=run.path.name)
        self._id = str(created.info.run_id)
        folder.mkdir(exist_ok=True)
        known.write_text(json.dumps({"run_id": self._id}) + "\n")
        for key, value in _flat(run.read_config()):
            self._client.log_param(self._id, key, value)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        batch = [
            self._entities.Metric(_mlflow_name(name), value, now_ms, step)
            for name, value in _finite(metrics).items()
        ]
        self._guarded(lambda: self._client.log_batch(self._id, metrics=batch))

    def close(self) -> None:
        self._guarded(lambda: self._client.set_terminated(self._id))


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def _mlflow_name(name: str) -> str:
    """It allows letters, digits and a few signs; `@` of avg@1 is not among them."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)


def _flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Dotted keys and values as text, at most 500 characters as MLflow wants it."""
    pairs: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            pairs += _flat(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", str(value)[:500]))
    return pairs
