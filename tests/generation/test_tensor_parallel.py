"""A replica of several ranks draws what one rank draws: the same tokens, the same log-probs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_program import drawn
from tiny_model import write_tiny_model

from llamarl_hpc.launch.steps import MpiExec
from llamarl_hpc.placement import World

HERE = Path(__file__).parent
TOLERANCE = 1e-5

# 3 kv heads cannot be cut evenly by 2 ranks, 4 not by 3
UNEVEN = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
UNEVEN |= {"intermediate_size": 100}
BIASED = {"attention_bias": True, "mlp_bias": True}
MODELS: list[tuple[str, dict[str, Any], str]] = [  # kind, sizes, generator.quantization
    ("llama", UNEVEN | BIASED | {"tied": False}, "none"),
    ("qwen2", UNEVEN | {"use_sliding_window": False}, "none"),
    ("llama", UNEVEN | BIASED, "int8"),
    ("qwen3", {"tied": False, "num_attention_heads": 8, "num_key_value_heads": 4}, "none"),
    ("llama", {"num_attention_heads": 8, "num_key_value_heads": 4}, "none"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Each model, and the same with other weights."""
    top = tmp_path_factory.mktemp("models")
    return [
        write_tiny_model(top / f"{quantization}.{number}.{seed}", kind, seed=seed, **config)
        for number, (kind, config, quantization) in enumerate(MODELS)
        for seed in (0, 1)
    ]


@pytest.fixture(scope="module")
def of_one_rank(folders: list[Path]) -> list[list[dict[str, Any]]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [
            drawn(old, new, World(), recompute=number % 2 == 1)
            for number, (old, new) in enumerate(zip(folders[::2], folders[1::2], strict=True))
        ]
    finally:
        torch.set_num_threads(threads)


@pytest.mark.mpi
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_draw_together_what_one_draws(
    tmp_path: Path,
    folders: list[Path],
    of_one_rank: list[list[dict[str, Any]]],
    num_ranks: int,
) -> None:
    results = run_ranks(num_ranks, tmp_path / "out.json", *folders)
    assert len(results) == len(of_one_rank) == len(MODELS)
    for together, alone in zip(results, of_one_rank, strict=True):
        assert [c["ids"] for c in together] == [c["ids"] for c in alone]
        assert [c["versions"] for c in together] == [c["versions"] for c in alone]
        assert any(len(c["versions"]) == 2 for c in alone)  # weights changed in flight
        for mine, wanted in zip(together, alone, strict=True):
            assert mine["logprobs"] == pytest.approx(wanted["logprobs"], abs=TOLERANCE)


def run_ranks(num_ranks: int, out: Path, *arguments: object) -> Any:
    mpiexec = MpiExec.find().argv(num_ranks, as_root=os.geteuid() == 0)
    done = subprocess.run(
        [*mpiexec, sys.executable, str(HERE / "ranks_program.py"), str(out), *map(str, arguments)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parents[1])]),
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())
