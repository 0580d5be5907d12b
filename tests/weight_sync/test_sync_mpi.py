"""Both transports between real MPI worlds, for any number of ranks; what they hold in memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from memory_program import NOT_HELD

from llamarl_hpc.run_dir import RunDir

HERE = Path(__file__).parent


def mpiexec() -> str:
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        pytest.skip("no mpiexec on this machine")
    return found


def mpi_environment() -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]),
    }


def mpi_run(size: int, program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [mpiexec(), "-n", f"{size}", sys.executable, str(program), *map(str, arguments)]
    return subprocess.run(
        command, env=mpi_environment(), capture_output=True, text=True, timeout=120
    )


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("num_trainers", "num_generators", "layout"),
    [(1, 1, "whole"), (2, 2, "whole"), (2, 2, "sharded"), (3, 1, "quantised")],
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
    result = mpi_run(
        num_trainers + num_generators,
        HERE / "mpi_program.py",
        run.path,
        transport,
        num_trainers,
        layout,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"ok {said}" in result.stdout


@pytest.mark.mpi
def test_no_rank_ever_holds_more_than_its_part(tmp_path: Path) -> None:
    run = RunDir.create_at(tmp_path / "run")
    result = mpi_run(4, HERE / "memory_program.py", run.path)
    if result.returncode == NOT_HELD:
        pytest.skip("the kernel of this machine does not hold RLIMIT_DATA")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ok" in result.stdout
