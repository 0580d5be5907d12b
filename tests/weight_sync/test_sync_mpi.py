"""Both transports between real MPI worlds, for any number of ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llamarl_hpc.run_dir import RunDir

HERE = Path(__file__).parent


def mpiexec() -> str:
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        pytest.skip("no mpiexec on this machine")
    return found


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("num_trainers", "num_generators", "layout"),
    [(1, 1, "whole"), (2, 2, "whole"), (2, 2, "sharded")],
)
@pytest.mark.parametrize(("transport", "said"), [("auto", "memory"), ("collective", "network")])
def test_worlds_exchange_weights_bit_by_bit(
    tmp_path: Path,
    transport: str,
    said: str,
    num_trainers: int,
    num_generators: int,
    layout: str,
) -> None:
    run = RunDir.create_at(tmp_path / "run")
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]),
    }
    program = [sys.executable, str(HERE / "mpi_program.py"), str(run.path), transport]
    result = subprocess.run(
        [mpiexec(), "-n", f"{num_trainers + num_generators}", *program, f"{num_trainers}", layout],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"ok {said}" in result.stdout
