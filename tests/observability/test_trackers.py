"""W&B and MLflow: what they are given, what a missing package says; and the real ones if there."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamarl_hpc.config.schema import LoggingConfig
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.observability import trackers
from llamarl_hpc.observability.json_lines import read_json_lines
from llamarl_hpc.observability.metrics_log import MetricsLog
from llamarl_hpc.run_dir import RunDir

METRICS = {"loss": 0.5, "eval/heldout/avg@1": 0.25, "grad_norm": math.nan}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create_at(tmp_path / "sums" / "a run")
    run.config.write_text("name: sums\ntrainer: {learning_rate: 0.5}\n")
    return run


class FakeWandb:
    """Remembers."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.logged: list[dict[str, float]] = []
        self.finished = 0

    Settings = SimpleNamespace

    def init(self, **settings: Any) -> Any:
        self.started.append(settings)
        return SimpleNamespace(log=self.logged.append, finish=self._finish)

    def _finish(self) -> None:
        self.finished += 1


class FakeMlflow:
    """Client and entities in one."""

    def __init__(self) -> None:
        self.tracking = SimpleNamespace(MlflowClient=self._client)
        self.entities = SimpleNamespace(Metric=lambda *values: values)
        self.batches: list[tuple[str, list[Any]]] = []
        self.parameters: dict[str, str] = {}
        self.created, self.ended, self.uri = 0, list[str](), ""

    def _client(self, tracking_uri: str) -> FakeMlflow:
        self.uri = tracking_uri
        return self

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return name

    def create_run(self, experiment: str, run_name: str) -> Any:
        self.created += 1
        return SimpleNamespace(info=SimpleNamespace(run_id=f"{experiment}-{run_name}"))

    def log_param(self, run_id: str, key: str, value: str) -> None:
        self.parameters[key] = value

    def log_batch(self, run_id: str, metrics: list[Any]) -> None:
        self.batches.append((run_id, metrics))

    def set_terminated(self, run_id: str) -> None:
        self.ended.append(run_id)


def log_of(run: RunDir, attempt: int = 1, **config: Any) -> MetricsLog:
    settings = LoggingConfig.model_validate({"tensorboard": False, **config})
    return MetricsLog(run, settings, attempt=attempt)


def test_trackers_get_what_the_metrics_file_gets(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb, mlflow = FakeWandb(), FakeMlflow()
    fakes = {"wandb": wandb, "mlflow": mlflow}
    monkeypatch.setattr(trackers, "import_module", fakes.__getitem__)
    for attempt in (1, 2):  # a resume continues the same runs
        log = log_of(run, attempt, wandb="offline", mlflow=True)
        log.step(attempt - 1, policy_version=attempt, metrics=METRICS)
        log.close()
        log.close()
    assert [row["loss"] for row in read_json_lines(run.metrics)] == [0.5, 0.5]
    seen = {"loss": 0.5, "eval/heldout/avg@1": 0.25}
    assert wandb.logged == [{**seen, "policy_version": 1}, {**seen, "policy_version": 2}]
    assert [s["mode"] for s in wandb.started] == ["offline"] * 2 and wandb.finished == 2
    assert {s["id"] for s in wandb.started} == {"a-run"}
    assert wandb.started[0]["config"]["trainer"] == {"learning_rate": 0.5}
    assert mlflow.created == 1 and mlflow.ended == ["sums-a run"] * 2
    assert mlflow.parameters == {"name": "sums", "trainer.learning_rate": "0.5"}
    (_, first), _ = mlflow.batches
    assert [(name, value, step) for name, value, _, step in first] == [
        ("loss", 0.5, 1),
        ("eval/heldout/avg_1", 0.25, 1),
    ]
    assert mlflow.uri == (run.path / "mlflow").as_uri()


@pytest.mark.parametrize(
    ("config", "key", "package"),
    [
        ({"wandb": "offline"}, "logging.wandb", "wandb"),
        ({"mlflow": True}, "logging.mlflow", "mlflow"),
    ],
)
def test_a_missing_package_is_an_error_of_one_sentence(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, config: Any, key: str, package: str
) -> None:
    def nothing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named '{name}'")

    monkeypatch.setattr(trackers, "import_module", nothing)
    with pytest.raises(ConfigError, match=f"{key} is on but the package {package} cannot be"):
        log_of(run, **config)


def test_a_tracker_that_fails_costs_its_figures_and_nothing_else(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mlflow = FakeMlflow()
    monkeypatch.setattr(trackers, "import_module", {"mlflow": mlflow}.__getitem__)
    log = log_of(run, mlflow=True)

    def full(run_id: str, metrics: list[Any]) -> None:
        raise OSError("No space left on device")

    mlflow.log_batch = full  # type: ignore[method-assign]
    for step in range(3):
        log.step(step, policy_version=step + 1, metrics=METRICS)
    log.close()
    assert len(read_json_lines(run.metrics)) == 3
    assert caplog.text.count("MLflow does not take figures") == 1


def test_nothing_is_imported_unless_it_is_switched_on(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "import_module", {}.__getitem__)
    log_of(run).close()


def test_real_mlflow_reads_the_figures_back(run: RunDir) -> None:
    mlflow = pytest.importorskip("mlflow", reason="no mlflow (pip install mlflow-skinny)")
    log = log_of(run, mlflow=True)
    for step in range(3):
        log.step(step, policy_version=step + 1, metrics={"loss": step / 2})
    log.close()
    client = mlflow.tracking.MlflowClient(tracking_uri=(run.path / "mlflow").as_uri())
    (experiment,) = client.search_experiments(filter_string="name = 'sums'")
    (found,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(1, 0.0), (2, 0.5), (3, 1.0)]
    assert found.data.params["trainer.learning_rate"] == "0.5"


def test_real_wandb_writes_a_run_that_can_be_synced(run: RunDir) -> None:
    pytest.importorskip("wandb", reason="no wandb (pip install wandb)")
    log = log_of(run, wandb="offline")
    log.step(0, policy_version=1, metrics={"loss": 0.5})
    log.close()
    (file,) = (run.path / "wandb").glob("offline-run-*/run-*.wandb")
    assert file.stat().st_size > 0
