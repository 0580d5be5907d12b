"""`bench train` at a tiny size, through the command, and what it makes of its rounds."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
from tiny_model import write_tiny_model
from typer.testing import CliRunner

from llamarl_hpc.cli.bench_train import MISSING, _Process, check_same_work, figures, make_task
from llamarl_hpc.cli.main import app
from llamarl_hpc.errors import LlamarlError
from llamarl_hpc.training.bench import task as bench_task
from llamarl_hpc.training.bench.task import Measured, Side, Task

TASK = Task(
    side="ours",
    model="",
    vocabulary=512,
    threads=1,
    prompts=4,
    completions=4,
    prompt_tokens=5,
    completion_tokens=6,
    accuracy=0.06,
    zero_stage=0,
    micro_batch_tokens=64,
    trl_rows=16,
    trl_checkpointing=False,
    trl_own_environment=False,
    pipe=0,
)


def measured(seconds: float, *, grad_norm: float = 2.0, peak: int = 400) -> Measured:
    return Measured(seconds=seconds, cpu_s=seconds / 2, grad_norm=grad_norm, peak_bytes=peak)


def a_round(machine: float) -> dict[Side, Measured]:
    return {
        "trl": measured(12.0 * machine, peak=2000),
        "ours": measured(6.0 * machine),
        "ours_skipping": measured(3.0 * machine, peak=300),
    }


def test_both_ways_of_ours_are_measured_and_do_the_same(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    out = tmp_path / "figures.json"
    words = ["bench", "train", "--model", str(model), "--prompts", "4", "--prompt-tokens", "5"]
    words += ["--tokens", "6", "--threads", "1", "--rounds", "1", "--json", str(out)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert found["ours_grad_norm"] == pytest.approx(found["ours_skipping_grad_norm"], rel=1e-5)
    assert found["ours_grad_norm"] > 0 and found["ours_s"] > 0 and found["ours_skipping_s"] > 0
    assert found["ours_peak_mib"] > found["ours_imports_mib"] > 50
    assert found["learnable_prompts"] == 1 and found["prompts"] == 4
    has_trl = find_spec("trl") is not None
    assert (found["vs_trl"] is None) is not has_trl
    assert (MISSING in result.output) is not has_trl
    if has_trl:
        assert found["trl_grad_norm"] == pytest.approx(found["ours_grad_norm"], rel=1e-4)


def test_ratios_are_taken_round_by_round() -> None:
    rounds = [a_round(machine) for machine in (1.0, 3.0, 0.5)]  # others work there too
    found = figures(TASK, rounds, {"trl": 50, "ours": 40, "ours_skipping": 40})
    assert found["vs_trl"] == pytest.approx(2.0)
    assert found["vs_trl_skipping"] == pytest.approx(4.0)
    assert found["vs_trl_cpu"] == pytest.approx(2.0)
    assert found["vs_trl_skipping_cpu"] == pytest.approx(4.0)
    assert found["memory_share"] == pytest.approx(0.2)
    assert found["memory_share_skipping"] == pytest.approx(0.15)
    assert found["ours_s"] == pytest.approx(6.0)


def test_different_gradients_are_not_compared() -> None:
    check_same_work([a_round(1.0)])
    wrong = a_round(1.0) | {"ours": measured(1.0, grad_norm=2.1)}
    with pytest.raises(LlamarlError, match="did not do the same work"):
        check_same_work([wrong])


@pytest.mark.parametrize(
    ("accuracy", "prompts", "learnable"),
    [(0.06, 16, 4), (0.06, 4, 1), (0.5, 16, 14), (0.0, 16, 1), (1.0, 16, 1)],
)
def test_as_many_groups_are_learnable_as_the_accuracy_lets_expect(
    accuracy: float, prompts: int, learnable: int
) -> None:
    task = msgspec.structs.replace(TASK, accuracy=accuracy, prompts=prompts)
    assert task.learnable_prompts == learnable
    assert sum(bench_task.rewards(task)) == learnable
    batch = bench_task.train_batch(task)
    moved = batch.advantages.reshape(prompts, 4).any(axis=1)
    assert moved.tolist() == [True] * learnable + [False] * (prompts - learnable)
    assert batch.advantages[:4].tolist() == [0.75, -0.25, -0.25, -0.25]


def test_only_trl_may_go_without_the_environment_of_a_job_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environments: list[dict[str, str]] = []

    class Started:
        def __init__(self, *_: object, env: dict[str, str], **__: object) -> None:
            environments.append(env)

        def wait(self, timeout: float) -> int:
            return 0

    monkeypatch.setattr("llamarl_hpc.cli.bench_train.subprocess.Popen", Started)
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    for side, own in (("ours", True), ("trl", True), ("trl", False)):
        task = msgspec.structs.replace(TASK, trl_own_environment=own)
        _Process(task, side).close()  # type: ignore[arg-type]
    assert ["MALLOC_TRIM_THRESHOLD_" in env for env in environments] == [True, False, True]
    assert {env["OMP_NUM_THREADS"] for env in environments} == {"1"}


def test_options_that_cannot_be_are_sentences(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")

    def error(*words: str) -> str:
        found = CliRunner().invoke(app, ["bench", "train", "--model", str(model), *words])
        return str(found.exception)

    assert "does not divide the 16 completions" in error("--trl-rows", "5")
    assert "are 309 together, but the model attends to 256" in error("--tokens", "264")
    assert make_task(str(model), threads=0, trl_rows=0, **NUMBERS).trl_rows == 16


NUMBERS = {
    "prompts": 4,
    "completions": 4,
    "prompt_tokens": 45,
    "completion_tokens": 64,
    "accuracy": 0.06,
    "zero_stage": 0,
    "micro_batch_tokens": 64,
    "trl_checkpointing": False,
    "trl_own_environment": False,
}
