"""The console script, called in the process of the test."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from llamarl_hpc.cli.main import main


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """(exit code, standard output, standard error) of `llamarl-hpc` with these words."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["llamarl-hpc", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    return run
