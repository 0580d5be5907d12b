"""`trainer-memory` through the command: the estimate, and what ranks really take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_model import write_tiny_model
from typer.testing import CliRunner

from llamarl_hpc.cli.main import app

# large enough that the model's part of the memory is not lost beside the program's
SIZE = {
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "initializer_range": 0.02,
}
DATA = "data: {tasks: [{name: basic_arithmetic}]}\n"
LARGER = SIZE | {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10}
LARGER |= {"num_attention_heads": 8, "num_key_value_heads": 4}


def figures(folder: Path, size: dict[str, Any], *settings: str, measure: bool) -> dict[str, Any]:
    model = folder / "model"
    if not model.exists():
        write_tiny_model(model, **size)
    (folder / "run.yaml").write_text(
        f"model: {{path: {model}}}\n{DATA}"
        "rollout: {prompts_per_step: 8, num_generations: 4, max_prompt_length: 32, "
        "max_completion_length: 32}\n"
        "trainer: {micro_batch_tokens: 320}\n"
    )
    words = ["trainer-memory", str(folder / "run.yaml"), "--json", str(folder / "out.json")]
    words += [word for setting in settings for word in ("--set", setting)]
    result = CliRunner().invoke(app, [*words, *(["--measure"] if measure else [])])
    assert result.exit_code == 0, result.output or str(result.exception)
    assert "peak of a step" in result.output
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


def test_parts_add_up_without_a_model_being_loaded(tmp_path: Path) -> None:
    found = figures(tmp_path, SIZE, "resources.trainer.ntasks_per_node=4", measure=False)
    assert found["ranks"] == 4
    parts = found["parts_bytes"]
    assert found["peak_bytes"] == sum(parts.values())
    assert found["checkpoint_peak_bytes"] == found["step_peak_bytes"] + parts["checkpoint"]
    assert "measured_step_peak_bytes" not in found


def relative(found: dict[str, Any], peak: str) -> float:
    """Estimate over measurement, had the program here the size that it had where its part of the
    estimate was found: other builds of torch have other sizes."""
    larger = found["measured_program_bytes"] - (383 << 20)
    ratio: float = (found[f"{peak}_peak_bytes"] + larger) / found[f"measured_{peak}_peak_bytes"]
    return ratio


@pytest.mark.mpi
def test_a_rank_takes_what_was_estimated(tmp_path: Path) -> None:
    found = figures(tmp_path, SIZE, "trainer.zero_stage=1", measure=True)
    assert relative(found, "step") == pytest.approx(1.0, abs=0.15)
    assert relative(found, "checkpoint") == pytest.approx(1.0, abs=0.15)


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "settings",
    [
        ["trainer.zero_stage=0"],
        ["trainer.zero_stage=1"],
        ["trainer.zero_stage=2"],
        ["trainer.zero_stage=3"],
        ["trainer.zero_stage=0", "trainer.dtype=bf16"],
        ["trainer.zero_stage=1", "trainer.dtype=bf16"],
        ["trainer.zero_stage=2", "trainer.dtype=bf16"],
        ["trainer.zero_stage=3", "trainer.dtype=bf16"],
        ["trainer.zero_stage=1", "trainer.gradient_checkpointing=true"],
        ["trainer.zero_stage=2", "trainer.offload_optimizer=true"],
        ["trainer.zero_stage=1", "model.lora={r: 8}"],
        ["trainer.zero_stage=1", "model.lora={r: 64}"],
    ],
    ids=lambda settings: ",".join(s.removeprefix("trainer.") for s in settings),
)
def test_every_stage_takes_what_was_estimated(
    tmp_path: Path, settings: list[str], ranks: int
) -> None:
    found = figures(
        tmp_path, LARGER, *settings, f"resources.trainer.ntasks_per_node={ranks}", measure=True
    )
    assert relative(found, "step") == pytest.approx(1.0, abs=0.15)
    assert relative(found, "checkpoint") == pytest.approx(1.0, abs=0.15)


def test_gpus_are_not_measured(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    (tmp_path / "run.yaml").write_text(
        f"model: {{path: {tmp_path / 'model'}}}\nresources: {{trainer: {{gpus_per_node: 1}}}}\n"
        f"{DATA}"
        "rollout: {max_prompt_length: 32, max_completion_length: 32}\n"
    )
    words = ["trainer-memory", str(tmp_path / "run.yaml"), "--measure"]
    result = CliRunner().invoke(app, words)
    assert "--measure reads the memory of processes" in str(result.exception)
