"""`bench weight-sync` at a tiny size, through the command, and what it makes of its rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llamarl_hpc.cli.bench_weight_sync import figures
from llamarl_hpc.cli.main import app
from llamarl_hpc.weight_sync.bench.task import Answer, Round, Task, model_specs


@pytest.mark.mpi
def test_every_way_is_measured_between_processes(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    words = ["bench", "weight-sync", "--size", "custom", "--parameters", "1", "--rounds", "1"]
    words += ["--trainers", "1", "--generators", "1", "--ranks-per-replica", "2"]
    words += ["--quantization", "int8", "--json", str(out)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    for key in ("shared_memory_vs_copy", "collective_vs_gather_broadcast"):
        assert found[key] > 0 and key in result.output
    assert found["collective_vs_raw_broadcast"] > 0 and found["collective_vs_disk"] > 0
    assert found["shared_memory_verified_in_flight_pause_s"] > 0
    assert found["collective_delta_s"] > 0 and found["collective_s_2_ranks_vs_1"] > 0
    assert found["collective_trainer_stall_s"] < found["collective_verified_s"]
    for way in ("shared_memory", "collective"):
        assert found[f"{way}_int8_vs_{way}"] > 0 and f"{way}_int8_trainer_stall_s" in result.output
        assert 0 < found[f"{way}_int8_trainer_stall_s"] < found[f"{way}_int8_s"]
    specs = model_specs("custom", "fp32", 1)
    layers = sum(s.numel for s in specs if len(s.shape) == 2 and "layers" in s.name)
    share = 1 - 3 / 4 * layers / sum(s.numel for s in specs)  # a byte of four; scales are few
    assert found["int8_bytes_share"] == pytest.approx(share, rel=0.01)
    assert found["shared_memory_file_mib"] > 2 * found["gigabytes"] * 1000**3 / 1024**2


def test_ratios_are_taken_round_by_round() -> None:
    def seconds(machine: float) -> dict[str, float]:
        ways = {"copy": 1.0, "shared_memory": 1.25, "shared_memory_verified": 2.0}
        ways |= {"collective": 5.0, "collective_verified": 6.0, "collective_delta": 1.0}
        ways |= {"shared_memory_int8": 2.5, "collective_int8": 4.0, "raw_broadcast": 4.0}
        return {
            w: machine * s for w, s in (ways | {"gather_broadcast": 15.0, "disk": 60.0}).items()
        }

    rounds = [
        Round(
            seconds=seconds(machine),
            stall=dict.fromkeys(list(seconds(1.0))[1:6], 1.1 * machine)
            | {"shared_memory_int8": 3.3 * machine, "collective_int8": 2.2 * machine},
            pause={"collective_verified": (1.5 * machine, 0.2 * machine, 1.2 * machine)},
            by_replicas={"1": machine, "2": 1.1 * machine},
            wide=5.25 * machine,
        )
        for machine in (1.0, 3.0, 0.5)  # others work there too
    ]
    answer = Answer(
        num_bytes=4_000_000_000,
        rounds=rounds,
        trainer_memory=0,
        generator_memory=0,
        shared_bytes=0,
        int8_bytes=1_200_000_000,
    )
    task = Task(
        folder="",
        size="1b",
        parameters=0,
        dtype="fp32",
        trainers=2,
        generators=2,
        zero_stage=3,
        rounds=3,
        ranks_per_replica=4,
        quantization="int8",
    )
    found = figures(task, answer)
    assert found["shared_memory_vs_copy"] == pytest.approx(0.8)
    assert found["collective_vs_raw_broadcast"] == pytest.approx(0.8)
    assert found["collective_vs_gather_broadcast"] == pytest.approx(3.0)
    assert found["collective_vs_disk"] == pytest.approx(12.0)
    assert found["collective_delta_vs_disk"] == pytest.approx(60.0)
    assert found["stall_vs_copy_collective"] == pytest.approx(1.1)
    assert found["collective_verified_in_flight_pause_s"] == pytest.approx(1.5)
    beyond = found["collective_verified_in_flight_pause_beyond_copy_in_steps"]
    assert beyond == pytest.approx(1.5)
    assert found["shared_memory_s_2_replicas_vs_1"] == pytest.approx(1.1)
    assert found["collective_s_4_ranks_vs_1"] == pytest.approx(1.05)
    assert found["shared_memory_gb_per_s_per_receiver"] == pytest.approx(3.2)
    assert found["int8_bytes_share"] == pytest.approx(0.3)
    assert found["collective_int8_gb_per_s_per_receiver"] == pytest.approx(0.3)
    assert found["collective_int8_vs_collective"] == pytest.approx(1.25)
    assert found["shared_memory_int8_vs_shared_memory"] == pytest.approx(0.5)
    assert found["shared_memory_int8_stall_vs_shared_memory"] == pytest.approx(3.0)
    assert found["stall_vs_copy_collective_int8"] == pytest.approx(2.2)


@pytest.mark.parametrize(("size", "millions"), [("135m", 134.5), ("1b", 1235.8), ("custom", 20)])
def test_made_up_models_have_the_size_of_the_real_ones(size: str, millions: float) -> None:
    numel = sum(spec.numel for spec in model_specs(size, "bf16", 20))
    assert numel / 1e6 == pytest.approx(millions, rel=0.1 if size == "custom" else 1e-3)


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--size", "7b", "--size is 135m, 1b or custom, not 7b"),
        ("--quantization", "fp8", "--quantization is none or int8, not fp8"),
    ],
)
def test_what_there_is_not_is_a_sentence(option: str, value: str, sentence: str) -> None:
    result = CliRunner().invoke(app, ["bench", "weight-sync", option, value])
    assert sentence in str(result.exception)
