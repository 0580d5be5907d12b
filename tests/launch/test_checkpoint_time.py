"""How long a checkpoint takes, from its size and from those that were made."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from llamarl_hpc.config.schema import Config
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.launch import checkpoint_time
from llamarl_hpc.launch.checkpoint_time import (
    check_new_run,
    check_resumed_run,
    checkpoint_bytes,
    expected_s,
)
from llamarl_hpc.run_dir import RunDir

SHAPES = {
    "model.embed_tokens.weight": [1000, 64],
    "model.layers.0.self_attn.q_proj.weight": [96, 64],
    "model.layers.0.mlp.down_proj.weight": [64, 256],
    "model.norm.weight": [64],
}


def write_weights(folder: Path, shapes: dict[str, list[int]]) -> Path:
    """A safetensors file whose tensors are holes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, size = end, 2
        for length in shape:
            size *= length
        end += size
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


def config(**launch: Any) -> Config:
    return Config.model_validate(
        {"launch": launch, "resources": {"trainer": {"nodes": 2, "ntasks_per_node": 4}}}
    )


def test_a_checkpoint_has_twelve_bytes_of_every_trained_parameter(tmp_path: Path) -> None:
    model = write_weights(tmp_path / "model", SHAPES)
    assert checkpoint_bytes(config(), model) == 12 * (64_000 + 96 * 64 + 64 * 256 + 64)
    lora = {"model": {"lora": {"r": 4, "target_modules": ["q_proj", "down_proj"]}}}
    adapters = Config.model_validate(lora)
    assert checkpoint_bytes(adapters, model) == 12 * 4 * (96 + 64 + 64 + 256)


def test_a_job_whose_checkpoint_cannot_be_written_in_time_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_weights(tmp_path / "model", {"a.weight": [1 << 20, 1 << 13]})  # 96 GiB
    monkeypatch.setattr(checkpoint_time, "_bytes_per_second", lambda folder: 0.05 * 2**30)
    with pytest.raises(ConfigError) as refused:
        check_new_run(config(), model, tmp_path / "runs")
    # 8 ranks write 0.4 GiB a second
    assert str(refused.value).startswith("a checkpoint of 96.0 GiB would take 240 s at least in ")
    assert "launch.signal_delay_s lets Slurm signal only 180 s" in str(refused.value)
    assert "raise it to 480, or" in str(refused.value)
    check_new_run(config(signal_delay_s=480), model, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_what_any_disk_takes_needs_no_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_weights(tmp_path / "model", SHAPES)
    monkeypatch.setattr(checkpoint_time, "_bytes_per_second", lambda folder: pytest.fail("tried"))
    check_new_run(config(signal_delay_s=1), model, tmp_path)
    assert expected_s(config(), model, RunDir(tmp_path)) == 0.0


def test_what_was_measured_counts_more_than_any_guess(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    lines = [
        {"event": "checkpoint", "time/checkpoint": 900.0},
        {"step": 4, "time/step": 3.0},
        {"event": "checkpoint", "time/checkpoint": 200.0},
        {"event": "eval"},
    ]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert expected_s(config(), write_weights(tmp_path / "model", SHAPES), run) == 200.0
    check_resumed_run(config(signal_delay_s=200), run)
    with pytest.raises(ConfigError, match=r"took 200 s, but .* only 180 s .* raise it to 420"):
        check_resumed_run(config(), run)


def test_a_trial_leaves_nothing_behind_and_says_how_fast(tmp_path: Path) -> None:
    speed = checkpoint_time._bytes_per_second(tmp_path / "not" / "there")
    assert 0.0 < speed < float("inf")
    assert list(tmp_path.iterdir()) == []
