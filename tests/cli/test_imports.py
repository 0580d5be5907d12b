"""Commands for login nodes answer at once because they import nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_HEAVY = {"torch", "transformers", "deepspeed", "mpi4py", "h5py", "zmq", "pandas", "matplotlib"}
_PROGRAM = """
import json, sys
from llamarl_hpc.cli.main import main
try:
    main()
except SystemExit as end:
    code = end.code
sys.stderr.write("\\n" + json.dumps([code, sorted(sys.modules)]))
"""


def modules_after(*arguments: str) -> tuple[str, set[str]]:
    """Standard output of a successful command, and the top-level modules it has imported."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    code, modules = json.loads(done.stderr.splitlines()[-1])
    assert code in (0, None), done.stderr
    return done.stdout, {name.partition(".")[0] for name in modules}


@pytest.mark.parametrize(
    "command", [[], ["run"], ["resume"], ["doctor"], ["rollouts", "show"], ["export"]]
)
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    out, modules = modules_after(*command, "--help")
    assert "Usage" in out
    assert modules & _HEAVY == set()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that is done."""
    run = tmp_path / "run"
    (run / "attempts" / "1").mkdir(parents=True)
    (run / "attempts" / "1" / "controller.0.log").write_text("all is well\n")
    (run / "config.yaml").write_text("trainer: {max_steps: 7}\n")
    attempt = {"number": 1, "outcome": "done", "resumed_from_step": 0, "started": 0.0}
    (run / "run.json").write_text(json.dumps({"attempts": [attempt]}))
    step = {"step": 6, "policy_version": 7, "attempt": 1, "reward/mean": 0.5, "time/step": 2.0}
    event = {"event": "eval", "policy_version": 7, "attempt": 1}
    event |= {"eval/heldout/num_prompts": 8, "eval/heldout/num_correct": 6.0}
    (run / "metrics.jsonl").write_text(json.dumps(step) + "\n" + json.dumps(event) + "\n")
    return run


def test_status_imports_nothing_heavy(run: Path) -> None:
    out, modules = modules_after("status", str(run))
    assert "7 of 7" in out and "0.750" in out and "done" in out
    assert modules & _HEAVY == set()


@pytest.mark.parametrize(
    ("command", "answer"),
    [("status", "done"), ("logs", "all is well"), ("cancel", "nothing to cancel")],
)
def test_commands_of_a_login_node_import_little(run: Path, command: str, answer: str) -> None:
    """They answer in less than half a second."""
    out, modules = modules_after(command, str(run))
    assert answer in out
    assert modules & (_HEAVY | {"numpy", "submitit", "omegaconf", "psutil"}) == set()
