"""One undisturbed synchronous run that several tests compare with, and clean-up of live runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_run import LiveRun, Start, write_run_files


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run with max_staleness 0, one replica and one trainer rank."""
    files = tmp_path_factory.mktemp("undisturbed")
    config = write_run_files(files)
    folder = files / "a run [1]"  # a name that shells and displays must not take apart
    live = LiveRun("run", config, "--plain", "--run-dir", folder, folder=folder)
    try:
        answer = live.finish()
    finally:
        live.destroy()
    assert answer.code == 0, answer.out + answer.err
    assert answer.err == ""
    return folder


@pytest.fixture
def start() -> Iterator[Start]:
    """`start("run", config, ..., folder=run)`; whatever is left after the test is killed."""
    runs: list[LiveRun] = []

    def begin(*arguments: object, **where: Any) -> LiveRun:
        runs.append(LiveRun(*arguments, "--plain", **where))
        return runs[-1]

    yield begin
    for run in runs:
        run.destroy()
