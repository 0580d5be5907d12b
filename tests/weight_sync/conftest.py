"""A run folder, and a trainer that shares its weights through memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from shared_memory_setup import Trainer

from llamarl_hpc.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create_at(tmp_path / "run")


@pytest.fixture
def trainer(run: RunDir) -> Iterator[Trainer]:
    trainer = Trainer(run)
    yield trainer
    trainer.close()
