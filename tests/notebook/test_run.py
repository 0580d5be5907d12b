"""A stored run through the handle, and the process that a notebook starts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import Plan, begin_attempt, begin_run, make_run
from tiny_run import write_run_files

from llamarl_hpc.errors import ConfigError, RunDirError
from llamarl_hpc.notebook import Run
from llamarl_hpc.notebook import background as background_module
from llamarl_hpc.notebook.run import StillGoingOn
from llamarl_hpc.notebook.status import Status
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.storage.atomic import write_json

PLAN = Plan(num_steps=4, prompts_per_step=2, num_generations=2, heldout=8, eval_steps=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = make_run(tmp_path_factory.mktemp("runs") / "r", PLAN)
    folder.log(1, "controller", 0).write_text("one\ntwo\nthree\n")
    return Run.attach(folder.path)


@pytest.fixture
def begun(tmp_path: Path) -> RunDir:
    """A run folder without an attempt."""
    return begin_run(tmp_path / "r", PLAN)


# ------------------------------------------------------------------ reading


def test_the_status_has_attributes_a_text_and_a_table(run: Run) -> None:
    status = run.status()
    assert (status.state, status.step, status.max_steps) == ("done", 4, 4)
    assert status.has_ended and status.reward == run.metrics()["reward/mean"].iloc[-1]
    assert "4 of 4" in repr(status) and "held-out accuracy" in repr(status)
    html = status._repr_html_()
    assert "4 of 4" in html and '<progress value="4" max="4">' in html
    assert "step" in dir(status)
    with pytest.raises(AttributeError, match="a status has no 'steps'; it has run, state"):
        status.steps  # noqa: B018


def test_components_of_a_job_and_why_they_wait_are_shown() -> None:
    part = {"component": 0, "name": "trainer", "state": "PENDING", "nodes": "", "reason": "QOS<"}
    figures: dict[str, Any] = {
        **dict.fromkeys(("reward", "staleness", "seconds_per_step", "eta_s")),
        **{"run": "/r", "state": "queued", "reason": "", "attempt": 0, "step": 0, "max_steps": 0},
        **{"accuracy": [], "idle": {}, "job": {"job_id": "700", "components": [part]}},
    }
    status = Status(figures)
    assert not status.has_ended
    assert "700" in repr(status) and "trainer  PENDING" in repr(status)
    assert "QOS&lt;" in status._repr_html_()


def test_tables_have_a_row_for_each_step_evaluation_and_completion(run: Run) -> None:
    assert list(run.metrics().index) == [0, 1, 2, 3]
    assert list(run.evaluations().index) == [0, 2, 4]
    rows = run.rollouts(2)
    assert len(rows) == 4 and set(rows["step"]) == {2} and rows["completion"].str.len().all()
    assert len(run.rollouts(steps=(1, 3), status="trained")) == 12
    assert len(run.rollouts(purpose="eval")) == 24
    first = run.rollout(int(rows["rollout_id"].iloc[0]))
    assert first.text == rows["completion"].iloc[0]
    with pytest.raises(ConfigError, match="there is no rollout 5 in"):
        run.rollout(5)
    with pytest.raises(ConfigError, match="step or steps, not both"):
        run.rollouts(1, steps=(1, 2))


def test_figure_report_and_logs(run: Run, tmp_path: Path) -> None:
    picture = run.plot(["reward"])
    assert picture is not None and len(picture.axes) == 1
    assert run.report(tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert run.logs(lines=2) == "two\nthree"
    with pytest.raises(ConfigError, match="no log of generator"):
        run.logs("generator")


def test_watching_outside_a_notebook_prints_lines_and_ends(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.plot(live=True) is None
    assert capsys.readouterr().out.startswith("done  4 of 4 steps  reward ")


def test_a_run_that_goes_on_is_waited_for_until_the_deadline(begun: RunDir) -> None:
    begin_attempt(begun, 1, resumed_from_step=0, started=time.time() + 5)
    info = begun.read_info()
    info["attempts"][0] |= {"pid": os.getpid(), "host": socket.gethostname()}
    write_json(begun.run_json, info)
    with pytest.raises(StillGoingOn, match=r"is running with 0 of 4 steps made after 0 s"):
        Run(begun).wait(0.0)
    Run(begun).watch(timeout_s=0.0)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="is not a run folder"):
        Run.attach(tmp_path)


# ------------------------------------------------------------------ the background process


def stand_in(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in place of Python."""
    program = folder / "stand-in"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(background_module.sys, "executable", str(program))


def test_a_process_is_starting_until_its_attempt_and_can_be_cancelled(
    begun: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")  # the kernel's own job
    stand_in(tmp_path, 'echo "job:$SLURM_JOB_ID $*"; exec sleep 100', monkeypatch)
    background_module.start_background(begun, ["trainer.max_steps=9"])
    run, other = Run(begun), Run.attach(begun.path)
    pid = background_module._children[-1].pid
    assert os.getsid(pid) == pid  # an interrupt of the kernel does not reach it
    assert run.status().state == other.status().state == "starting"
    with pytest.raises(ConfigError, match="is starting; wait for its end"):
        other.resume()
    while "resume" not in begun.background_log.read_text():
        time.sleep(0.01)
    words = begun.background_log.read_text().split()
    assert words[0] == "job:" and words[-2:] == ["--set", "trainer.max_steps=9"]
    assert "had not begun" in other.cancel()
    assert run.status().state == "not started"
    assert background_module._children[-1].wait(10) == -signal.SIGTERM


def test_a_process_that_ends_before_its_attempt_gives_its_last_words(
    begun: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, 'echo "error: no luck today" >&2; exit 2', monkeypatch)
    background_module.start_background(begun)
    status = Run(begun).wait(30.0, every_s=0.02)
    assert (status.state, status.reason) == ("failed", "no luck today")


def test_an_attempt_speaks_for_itself(begun: RunDir) -> None:
    entry = {"pid": 1, "host": "elsewhere", "started": time.time()}
    write_json(begun.background, entry)
    assert Run(begun).status().reason == "as process 1 on elsewhere"
    with pytest.raises(ConfigError, match="started by process 1 on elsewhere"):
        Run(begun).cancel()
    begin_attempt(begun, 1, resumed_from_step=0, started=entry["started"] + 1)
    assert Run(begun).status().state == "running"


@pytest.mark.e2e
@pytest.mark.mpi
@pytest.mark.timeout(600)
def test_a_run_in_the_background_outlives_its_kernel_and_resumes(tmp_path: Path) -> None:
    """The kernel here is a Python that ends as soon as it has started the run."""
    write_run_files(
        tmp_path, trainer={"max_steps": 2, "save_steps": 2}, evaluation={"num_prompts": 0}
    )
    code = (
        "from llamarl_hpc.notebook import Experiment\n"
        "run = Experiment.load('config.yaml', {'trainer.max_steps': 2}).start('r')\n"
        "print(run.status().state)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert said.stdout == "starting\n", said.stderr
    run = Run.attach(tmp_path / "r")
    try:
        status = run.wait(250.0, every_s=0.3)
        assert (status.state, status.step) == ("done", 2), run.folder.background_log.read_text()
        with pytest.raises(ConfigError, match="the run is complete: 2 steps"):
            run.resume()
        status = run.resume({"trainer.max_steps": 3}).wait(250.0, every_s=0.3)
        assert (status.state, status.step, status.attempt) == ("done", 3, 2)
        assert list(run.metrics().index) == [0, 1, 2]
        assert "trainer rank 0 of 1" in run.logs("trainer")
    finally:
        run.cancel(now=True)  # after a failure; else there is nothing to cancel
