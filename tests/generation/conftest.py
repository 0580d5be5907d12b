"""One random model for the tests of this folder that need any."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))
