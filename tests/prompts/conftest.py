"""A model folder with a tokenizer, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_tokenizer import write_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "model")
