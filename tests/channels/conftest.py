"""A run folder, and a controller's end that is closed after the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from channel_setup import Setup

from llamarl_hpc.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create_at(tmp_path / "run")


@pytest_asyncio.fixture
async def setup(run: RunDir) -> AsyncIterator[Setup]:
    setup = Setup(run)
    yield setup
    await setup.close()
