"""Stub programs in PATH that answer as a test tells them, and write down how they were called."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

COMMANDS = ("sbatch", "squeue", "sacct", "scancel", "srun", "scontrol", "sinfo")

_PROGRAM = """#!{python} -S
import json, os, pathlib, sys
here = pathlib.Path(__file__).parent
name = pathlib.Path(__file__).name
calls = here / (name + ".calls")
with calls.open("a") as file:
    file.write(json.dumps({{"argv": sys.argv[1:], "env": dict(os.environ)}}) + "\\n")
answers = json.loads((here / (name + ".answers")).read_text())
number = len(calls.read_text().splitlines()) - 1
code, out, err = answers[min(number, len(answers) - 1)]
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""


class FakeSlurm:
    """`answer("squeue", (0, "700+0|RUNNING|n1|None", ""))`; the last answer is given for ever."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        folder.mkdir()
        for name in COMMANDS:
            (folder / name).write_text(_PROGRAM.format(python=sys.executable))
            (folder / name).chmod(0o755)
            self.answer(name, (0, "", ""))
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def answer(self, command: str, *answers: tuple[int, str, str]) -> None:
        """From now on; what was called before is forgotten."""
        (self.folder / f"{command}.answers").write_text(json.dumps(answers))
        (self.folder / f"{command}.calls").unlink(missing_ok=True)

    def calls(self, command: str) -> list[dict[str, Any]]:
        path = self.folder / f"{command}.calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]
