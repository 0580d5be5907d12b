"""One real cluster for all tests of this folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Started once; its commands are meant by SLURM_CONF, which is set as long as it lives."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # pytest's own are too long for sockets
    made = Cluster(folder)
    before = os.environ.get("SLURM_CONF")
    os.environ.update(made.environ())
    try:
        made.start()
        yield made
    finally:
        made.stop()
        if before is None:
            del os.environ["SLURM_CONF"]
        else:
            os.environ["SLURM_CONF"] = before
        shutil.rmtree(folder, ignore_errors=True)
