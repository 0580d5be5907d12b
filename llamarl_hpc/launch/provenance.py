"""Which software and which model a run was made with; goes into run.json."""

from __future__ import annotations

import platform
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from llamarl_hpc.models.load import model_hash, tokenizer_hash

_PACKAGES = (
    "llamarl-hpc",
    "torch",
    "deepspeed",
    "transformers",
    "mpi4py",
    "h5py",
    "numpy",
    "math-verify",
    "reasoning-gym",
)


def describe_software(model_folder: Path) -> dict[str, Any]:
    """Versions, commit, host, and content hashes of the starting model and its tokenizer."""
    return {
        "versions": {"python": platform.python_version()} | _versions(),
        "git": _commit(),
        "host": socket.gethostname(),
        "model_folder": str(model_folder),
        "model_hash": model_hash(model_folder),
        "tokenizer_hash": tokenizer_hash(model_folder),
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """Commit of the source tree this package runs from, with `-dirty`; empty without git."""
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip()
