"""Ending a run: which command is given to whom, and what is said afterwards."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fake_slurm import FakeSlurm
from run_folders import MakeRun

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.manage.cancel import NotEnded, cancel_run
from llamarl_hpc.run_dir import RunDir

RUNNING = (0, "700+0|RUNNING|n1|None\n700+1|RUNNING|n2|None\n", "")
PENDING = (0, "700+0|PENDING||Priority\n700+1|PENDING||None\n", "")
ENDED = (0, "700+0|COMPLETED|n1|None\n700+1|CANCELLED|n2|None\n", "")


def signals(slurm: FakeSlurm) -> list[list[str]]:
    return [call["argv"] for call in slurm.calls("scancel")]


def test_a_running_job_is_asked_for_a_checkpoint(slurm: FakeSlurm, make_run: MakeRun) -> None:
    run = make_run(jobs=["700"], attempts=[{"job_id": "700"}])
    slurm.answer("squeue", RUNNING, RUNNING, ENDED)
    told: list[str] = []
    said = cancel_run(run, tell=told.append)
    assert signals(slurm) == [["--batch", "--signal=USR2", "700"]]
    assert told == ["job 700 was told to write a checkpoint and end"]
    assert run.stop_requested.exists()
    assert said.startswith("job 700 was ended at once")  # the stub's controller wrote nothing


def test_what_the_controller_wrote_last_is_what_is_said(
    slurm: FakeSlurm, make_run: MakeRun
) -> None:
    run = make_run(jobs=["700"], attempts=[{"job_id": "700", "outcome": "stopped", "reason": "r"}])
    slurm.answer("squeue", RUNNING, ENDED)  # it is just writing its last lines
    assert cancel_run(run) == "job 700 has ended: r"


@pytest.mark.parametrize("now", [False, True])
def test_a_job_that_waits_is_cancelled(slurm: FakeSlurm, make_run: MakeRun, now: bool) -> None:
    slurm.answer("squeue", PENDING, (0, "700+0|CANCELLED||None\n700+1|CANCELLED||None\n", ""))
    said = cancel_run(make_run(jobs=["700"]), now=now)
    assert signals(slurm) == [["700"]]
    assert said == "job 700 is cancelled; its controller had not begun"


def test_now_takes_the_whole_job_away(slurm: FakeSlurm, make_run: MakeRun) -> None:
    slurm.answer("squeue", RUNNING, ENDED)
    cancel_run(make_run(jobs=["700"], attempts=[{"job_id": "700"}]), now=True)
    assert signals(slurm) == [["700"]]


def test_a_job_that_waits_to_go_on_is_cancelled_before_the_one_that_runs(
    slurm: FakeSlurm, make_run: MakeRun
) -> None:
    both = (0, "700+0|RUNNING|n1|None\n710+0|PENDING||Dependency\n", "")
    slurm.answer("squeue", both, (0, "700+0|COMPLETED|n1|None\n710+0|CANCELLED||None\n", ""))
    cancel_run(make_run(jobs=["700", "710"], attempts=[{"job_id": "700"}]))
    assert signals(slurm) == [["710"], ["--batch", "--signal=USR2", "700"]]


def test_a_job_that_does_not_end_is_named(slurm: FakeSlurm, make_run: MakeRun) -> None:
    slurm.answer("squeue", RUNNING)
    with pytest.raises(NotEnded, match=r"job 700 \(RUNNING\) has not ended 0 s after"):
        cancel_run(make_run(jobs=["700"], attempts=[{"job_id": "700"}]), wait_s=0.0)


def test_what_scancel_refuses_is_one_sentence(slurm: FakeSlurm, make_run: MakeRun) -> None:
    slurm.answer("squeue", RUNNING)
    slurm.answer("scancel", (1, "", "scancel: error: Kill job error on job id 700: Access\ndenied"))
    with pytest.raises(ConfigError, match=r"refused to end job 700: .* Access denied"):
        cancel_run(make_run(jobs=["700"], attempts=[{"job_id": "700"}]))


@pytest.mark.parametrize("outcome", ["done", "stopped", "failed"])
def test_what_has_ended_is_left_alone(slurm: FakeSlurm, make_run: MakeRun, outcome: str) -> None:
    slurm.answer("squeue", ENDED)
    run = make_run(jobs=["700"], attempts=[{"job_id": "700", "outcome": outcome}])
    assert cancel_run(run) == f"nothing to cancel: the run is {outcome}"
    assert signals(slurm) == [] and not run.stop_requested.exists()


@pytest.mark.parametrize("outcome", ["done", "stopped", "failed"])
def test_a_job_that_slurm_has_yet_to_close_is_left_alone(
    slurm: FakeSlurm, make_run: MakeRun, outcome: str
) -> None:
    slurm.answer("squeue", RUNNING, ENDED)
    run = make_run(jobs=["700"], attempts=[{"job_id": "700", "outcome": outcome}])
    assert cancel_run(run, wait_s=30.0) == f"job 700 has ended: {outcome}"
    assert signals(slurm) == [] and not run.stop_requested.exists()


def test_a_job_that_an_operator_puts_back_after_its_end_is_cancelled(
    slurm: FakeSlurm, make_run: MakeRun
) -> None:
    run = make_run(jobs=["700"], attempts=[{"job_id": "700", "outcome": "failed", "ended": 5.0}])
    slurm.answer("squeue", PENDING, ENDED)
    cancel_run(run, wait_s=30.0)
    assert signals(slurm) == [["700"]] and run.stop_requested.exists()
    start = time.strftime("%Y-%m-%dT%H:%M:%S")
    slurm.answer("squeue", (0, f"700+0|RUNNING|n1|None|{start}|N/A\n", ""), ENDED)
    slurm.answer("scancel", (0, "", ""))
    cancel_run(run, wait_s=30.0)
    assert signals(slurm) == [["700"]]


def test_a_requeued_job_that_waits_is_cancelled_and_said_to_be(
    slurm: FakeSlurm, make_run: MakeRun
) -> None:
    before = {"job_id": "700", "outcome": "stopped", "reason": "x", "continued_by": "requeue"}
    run = make_run(jobs=["700"], attempts=[before])
    slurm.answer("squeue", (0, "700+0|PENDING||BeginTime\n", ""), (0, "700+0|CANCELLED||x\n", ""))
    assert cancel_run(run) == "job 700 is cancelled; it had not gone on"
    assert signals(slurm) == [["700"]] and run.stop_requested.exists()


def test_a_run_that_was_done_before_it_heard_is_not_marked_as_cancelled(
    slurm: FakeSlurm, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(jobs=["700"], attempts=[{"job_id": "700"}])

    def end(jobs: object, folder: RunDir, wait_s: float) -> None:
        entry = {**folder.read_info()["attempts"][0], "outcome": "done"}
        folder.run_json.write_text(json.dumps({**folder.read_info(), "attempts": [entry]}))

    slurm.answer("squeue", RUNNING)
    monkeypatch.setattr("llamarl_hpc.manage.cancel._wait_for_jobs", end)
    assert cancel_run(run) == "job 700 has ended: done"
    assert not run.stop_requested.exists()


def test_a_run_whose_controller_was_killed_is_not_called_running(
    slurm: FakeSlurm, make_run: MakeRun
) -> None:
    slurm.answer("squeue", ENDED)
    run = make_run(jobs=["700"], attempts=[{"job_id": "700", "outcome": "running"}])
    assert "the controller was killed" in cancel_run(run)


# ------------------------------------------------------------------ processes of this machine

# a controller: stops after the step when told once, at once when told twice
_CONTROLLER = """
import json, pathlib, signal, sys, time
path = pathlib.Path(sys.argv[1])
def end(reason):
    info = json.loads(path.read_text())
    info["attempts"][-1] |= {"outcome": "stopped", "reason": reason}
    path.write_text(json.dumps(info))
    sys.exit(4)
told = []
signal.signal(signal.SIGTERM, lambda *_: end("stopped by SIGTERM after step 3"))
signal.signal(signal.SIGINT, lambda *_: end("at once") if told else told.append(1))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def live(make_run: MakeRun) -> Iterator[tuple[RunDir, subprocess.Popen[str]]]:
    run = make_run(attempts=[{}])
    process = subprocess.Popen(
        [sys.executable, "-c", _CONTROLLER, run.run_json], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    entry = run.read_info()["attempts"][0]
    entry |= {"pid": process.pid, "host": socket.gethostname(), "started": time.time()}
    run.run_json.write_text(json.dumps({"attempts": [entry]}))
    yield run, process
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("now", "said"), [(False, "stopped by SIGTERM after step 3"), (True, "at once")]
)
def test_a_controller_of_this_machine_is_told_to_stop(
    live: tuple[RunDir, subprocess.Popen[str]], now: bool, said: str
) -> None:
    run, _ = live
    assert cancel_run(run, now=now, wait_s=30.0) == f"the run has ended: {said}"
    assert run.stop_requested.exists()


def test_a_controller_that_does_not_end_is_named(
    live: tuple[RunDir, subprocess.Popen[str]],
) -> None:
    run, process = live
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(NotEnded, match=f"process {process.pid} has not ended"):
        cancel_run(run, wait_s=0.0)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"host": socket.gethostname(), "pid": 4_000_000}, "nothing to cancel"),
        ({"host": "elsewhere", "pid": 1}, "process 1 on elsewhere"),
    ],
)
def test_other_processes_are_never_signalled(
    make_run: MakeRun, entry: dict[str, Any], says: str
) -> None:
    run = make_run(attempts=[entry])
    try:
        assert says in cancel_run(run)
    except ConfigError as error:
        assert says in str(error) and entry["host"] == "elsewhere"


def test_a_run_in_a_shell_of_salloc_is_told_as_a_process(
    slurm: FakeSlurm, live: tuple[RunDir, subprocess.Popen[str]]
) -> None:
    run, _ = live
    info = run.read_info()
    info["attempts"][0]["job_id"] = "800"
    run.run_json.write_text(json.dumps(info))
    slurm.answer("squeue", (0, "800|RUNNING|n1|None\n", ""))
    assert cancel_run(run, wait_s=30.0) == "the run has ended: stopped by SIGTERM after step 3"
    assert signals(slurm) == []
