"""Shared by all tests: marks that this machine cannot serve are skipped, with the reason.

Being here also puts this folder on sys.path, so that tests of all parts can use `tiny_model`.
"""

from __future__ import annotations

import os
import shutil
import sys
from functools import cache
from pathlib import Path

import pytest

# As the launcher gives it to executors; read by MKL at its first call. Some tests compare bits.
os.environ.setdefault("MKL_CBWR", "AUTO")


@cache
def _cannot_serve(mark: str) -> str:
    """Why tests of this mark cannot run here; empty when they can."""
    if mark == "mpi" and not _beside_python("mpiexec"):
        return "no mpiexec on PATH or beside python; 'make setup' installs one"
    if mark == "slurm" and not (shutil.which("sbatch") and shutil.which("slurmctld")):
        return "no Slurm (sbatch, slurmctld) on PATH"
    if mark == "long" and "LLAMARL_LONG_TESTS" not in os.environ:
        return "takes minutes; LLAMARL_LONG_TESTS=1 runs it"
    if mark == "gpu":
        import torch

        return "" if torch.cuda.is_available() else "no CUDA device"
    return ""


def _beside_python(program: str) -> bool:
    return bool(shutil.which(program)) or (Path(sys.executable).parent / program).exists()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in ("mpi", "slurm", "gpu", "long"):
            if item.get_closest_marker(mark) and (reason := _cannot_serve(mark)):
                item.add_marker(pytest.mark.skip(reason=reason))
