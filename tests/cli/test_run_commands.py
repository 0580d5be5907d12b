"""status, logs, cancel and resume as a person types them, right and wrong."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm
from tiny_run import cli

from llamarl_hpc.run_dir import RunDir

PENDING = "700+0|PENDING||Priority|2030-01-01T08:30:00|N/A\n700+1|PENDING||None|N/A|N/A\n"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "bin", monkeypatch)
    for command in ("squeue", "scontrol"):
        fake.answer(command, (1, "", "slurm_load_jobs error: Invalid job id specified\n"))
    return fake


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    (run.path / "slurm").mkdir(parents=True)
    run.config.write_text("trainer: {max_steps: 10}\n")
    job = {"id": "700", "cluster": "", "submitted": time.time()}
    run.run_json.write_text(json.dumps({"attempts": [], "jobs": [job]}))
    return run


def test_status_tells_of_a_job_that_waits(slurm: FakeSlurm, run: RunDir, tmp_path: Path) -> None:
    slurm.answer("squeue", (0, PENDING, ""))
    answer = cli("status", run.path, "--json", tmp_path / "x" / "figures.json")
    assert answer.code == 0, answer.err
    rows = dict(line.split(maxsplit=1) for line in answer.out.splitlines())
    assert rows["state"] == "queued"
    assert rows["because"] == "jobs with a higher priority come first"
    assert rows["job"] == "700  PENDING"
    assert "PENDING  (Priority: jobs with a higher priority come first)" in answer.out
    assert "expected start" in answer.out and "01 Jan 08:30" in answer.out
    figures = json.loads((tmp_path / "x" / "figures.json").read_text())
    assert (figures["state"], figures["job"]["job_id"], figures["fits"]) == ("queued", "700", None)


def test_status_tells_how_long_a_stop_takes_and_when_slurm_signals(
    slurm: FakeSlurm, run: RunDir
) -> None:
    run.config.write_text("trainer: {max_steps: 10}\nlaunch: {signal_delay_s: 180}\n")
    attempt = {"number": 1, "job_id": "700", "started": time.time(), "outcome": "running"}
    run.run_json.write_text(json.dumps({**run.read_info(), "attempts": [attempt]}))
    run.metrics.write_text('{"step": 0, "attempt": 1, "time/step": 20.0, "time/stop": 44.4}\n')
    slurm.answer("squeue", (0, "700+0|RUNNING|n1|None|N/A|N/A\n", ""))
    answer = cli("status", run.path)
    assert answer.code == 0, answer.err
    assert "about 44 s; Slurm signals 180 s before the job's end" in " ".join(answer.out.split())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["status", "nope"], "nope is not a run folder"),
        (["status", "799"], "knows of a run in job 799"),
        (["logs", "RUN"], "nothing was written yet: the run has not started"),
        (["logs", "RUN", "--attempt", "2"], "there is no attempt 2: the run has made 0"),
        (["cancel", "700_3"], "a job of an array"),
        (["resume", "nope"], "nope is not a run folder"),
        (["status", "DAMAGED"], "run.json is damaged"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    slurm: FakeSlurm, run: RunDir, command: list[str], message: str
) -> None:
    if "DAMAGED" in command:
        run.run_json.write_text('{"attempts": [')
    words = [str(run.path) if word in ("RUN", "DAMAGED") else word for word in command]
    answer = cli(*words)
    assert answer.code == 2 and message in answer.err, answer.err
    assert len(answer.err.splitlines()) == 1
