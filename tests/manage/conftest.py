"""Run folders as controllers leave them, and stub programs for Slurm."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm
from run_folders import GONE, NO_ACCOUNTING, SCRIPT, MakeRun, attempt

from llamarl_hpc.run_dir import RunDir


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Knows no job until a test says otherwise."""
    fake = FakeSlurm(tmp_path / "bin", monkeypatch)
    fake.answer("squeue", GONE)
    fake.answer("scontrol", GONE)
    fake.answer("sacct", NO_ACCOUNTING)
    return fake


@pytest.fixture
def no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'nothing'}")


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """`make_run(attempts=[...], jobs=["700"], steps=[...])`, with defaults for what is left out."""

    def make(
        *,
        attempts: list[dict[str, Any]] | None = None,
        jobs: list[str] | None = None,
        steps: list[dict[str, Any]] | None = None,
        name: str = "run",
        config: str = "trainer: {max_steps: 10}\nlaunch: {signal_delay_s: 180}\n",
    ) -> RunDir:
        run = RunDir(tmp_path / name)
        (run.path / "slurm").mkdir(parents=True)
        run.config.write_text(config)
        entries = [{**attempt(k + 1), **given} for k, given in enumerate(attempts or [])]
        for entry in entries:
            run.attempt(entry["number"]).mkdir(parents=True)
        submitted = time.time() - 100.0
        found = []
        for number, job in enumerate(jobs or []):
            (run.path / "slurm" / f"{job}_submission.sh").write_text(SCRIPT)
            found.append({"id": job, "cluster": "", "submitted": submitted + number})
        run.run_json.write_text(json.dumps({"attempts": entries, "jobs": found}))
        if steps is not None:
            lines = [{"attempt": 1, "policy_version": s["step"] + 1, **s} for s in steps]
            run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return run

    return make
