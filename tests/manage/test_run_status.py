"""`read_status`: the run folder and the queue, with every way in which they may disagree."""

from __future__ import annotations

import json
import os
import socket
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from fake_slurm import FakeSlurm
from run_folders import DOWN, MakeRun

from llamarl_hpc.manage.status import read_status

RUNNING = (0, "700+0|RUNNING|n[1-2]|None\n700+1|RUNNING|n3|None\n", "")
PENDING = (0, "700+0|PENDING||Priority|2030-01-01T00:00:00|N/A\n700+1|PENDING||None\n", "")


def ended(state: str) -> tuple[int, str, str]:
    return 0, f"700+0|{state}|n1|None\n700+1|CANCELLED|n3|None\n", ""


def by(job: str, outcome: str = "running", **more: Any) -> dict[str, Any]:
    return {"job_id": job, "outcome": outcome, **more}


STOPPED = by("700", "stopped", reason="stopped by SIGUSR2", ended=time.time() - 40.0)


@pytest.mark.parametrize(
    ("attempts", "squeue", "state", "reason"),
    [
        ([], PENDING, "queued", "jobs with a higher priority come first"),
        ([], RUNNING, "starting", ""),
        ([by("700")], RUNNING, "running", ""),
        ([by("700", "done")], ended("COMPLETED"), "done", ""),
        ([STOPPED], ended("COMPLETED"), "stopped", "stopped by SIGUSR2"),
        ([by("700")], ended("TIMEOUT"), "killed", "job 700 ended as TIMEOUT"),
        ([], ended("FAILED"), "not started", "job 700 ended as FAILED before its controller began"),
        # requeued: waits again, runs again
        ([STOPPED | {"continued_by": "requeue"}], PENDING, "queued", "higher priority"),
        (
            [STOPPED | {"continued_by": "requeue"}],
            (0, f"700+0|RUNNING|n1|None|{time.strftime('%Y-%m-%dT%H:%M:%S')}|N/A\n", ""),
            "starting",
            "",
        ),
        ([STOPPED | {"continued_by": "requeue"}, by("700")], RUNNING, "running", ""),
        # requeued, and cancelled while it waited
        (
            [STOPPED | {"continued_by": "requeue"}],
            ended("CANCELLED"),
            "stopped",
            "job 700 ended as CANCELLED before it went on; before: stopped by SIGUSR2",
        ),
        # an earlier job made the attempt, and this one waits
        ([by("699", "stopped")], PENDING, "queued", "higher priority"),
        ([by("699", "stopped")], ended("CANCELLED"), "stopped", "before its controller began"),
    ],
)
def test_the_state_of_a_job(
    slurm: FakeSlurm,
    make_run: MakeRun,
    attempts: list[dict[str, Any]],
    squeue: tuple[int, str, str],
    state: str,
    reason: str,
) -> None:
    slurm.answer("squeue", squeue)
    figures = read_status(make_run(attempts=attempts, jobs=["699", "700"]))
    assert figures["state"] == state and reason in figures["reason"]
    assert figures["warnings"] == []


@pytest.mark.parametrize(
    ("attempts", "state"),
    [([], "queued"), ([by("700")], "running"), ([by("700", "done")], "done")],
)
def test_a_silent_slurm_changes_nothing_and_is_told_of(
    slurm: FakeSlurm, make_run: MakeRun, attempts: list[dict[str, Any]], state: str
) -> None:
    slurm.answer("squeue", DOWN)
    slurm.answer("sacct", (0, "700+0|FAILED|n1\n", ""))  # of a start before a requeue
    figures = read_status(make_run(attempts=attempts, jobs=["700"]))
    assert figures["state"] == state
    (warning,) = figures["warnings"]
    assert "Unable to contact slurm controller" in warning


def test_without_any_slurm_command_the_folder_speaks(no_slurm: None, make_run: MakeRun) -> None:
    figures = read_status(make_run(attempts=[by("700")], jobs=["700"]))
    assert figures["state"] == "running" and 45.0 < figures["last_sign_s"] < 60.0
    assert figures["job"]["state"] is None
    (warning,) = figures["warnings"]
    assert "there is no Slurm on this machine" in warning


def test_a_job_that_everybody_has_forgotten_has_ended(slurm: FakeSlurm, make_run: MakeRun) -> None:
    killed = read_status(make_run(attempts=[by("700")], jobs=["700"]))
    assert (killed["state"], killed["reason"]) == ("killed", "Slurm knows job 700 no more")
    never = read_status(make_run(jobs=["700"], name="never"))
    assert never["state"] == "not started"


def test_components_of_a_job_by_hand_have_the_names_of_their_order(
    slurm: FakeSlurm, make_run: MakeRun
) -> None:
    slurm.answer("squeue", RUNNING)
    parts = read_status(make_run(attempts=[by("700")]))["job"]["components"]
    assert [part["name"] for part in parts] == ["trainer", "generator"]


def test_components_have_names_nodes_and_reasons(slurm: FakeSlurm, make_run: MakeRun) -> None:
    run = make_run(jobs=["700"])
    table = "700+0|RUNNING|n[1-2]|None\n700+1|PENDING||QOSMaxGRESPerUser\n"
    slurm.answer("squeue", (0, table, ""))
    job = read_status(run)["job"]
    assert job["components"] == [
        {
            "component": 0,
            "name": "trainer",
            "state": "RUNNING",
            "nodes": "n[1-2]",
            "reason": "",
            "because": "",
        },
        {
            "component": 1,
            "name": "generator (2 replicas)",
            "state": "PENDING",
            "nodes": "",
            "reason": "QOSMaxGRESPerUser",
            "because": "a user's limit of the QoS on GPUs is reached",
        },
    ]
    slurm.answer("squeue", PENDING)
    expected = time.mktime(time.strptime("2030-01-01", "%Y-%m-%d"))
    assert read_status(run)["job"]["expected_start"] == expected


@pytest.mark.parametrize(
    ("lines", "now"),
    [
        ([{"disk/waiting": 1.0}], "waits for space on "),
        ([{"disk/waiting": 1.0}, {"disk/waiting": 0.0}], ""),
        ([{"disk/waiting": 1.0}, {"step": 4}], ""),
        ([{"disk/waiting": 1.0, "attempt": 0}], ""),  # of an attempt before
    ],
)
def test_a_run_that_waits_for_space_says_so(
    make_run: MakeRun, lines: list[dict[str, Any]], now: str
) -> None:
    run = make_run(attempts=[{}])
    whole = [{"event": "disk", "policy_version": 3, "attempt": 1, "time": 5.0, **x} for x in lines]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in whole))
    said = read_status(run)["now"]
    assert said.startswith(now and f"{now}{run.path} since ") and bool(said) is bool(now)


def test_a_full_disk_is_told_without_the_event_that_it_did_not_take(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(attempts=[{}])
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=4096))
    assert read_status(run)["now"] == f"waits for space on {run.path}, nothing is free"
    ended = make_run(attempts=[{"outcome": "failed"}], name="ended")
    assert read_status(ended)["now"] == ""


# ------------------------------------------------------------------ without a job


def test_a_run_of_another_host_is_not_taken_for_killed(make_run: MakeRun) -> None:
    run = make_run(attempts=[{"host": "elsewhere", "pid": 4_000_000}])
    assert read_status(run)["state"] == "running"


@pytest.mark.parametrize(
    ("pid", "started", "state"),
    [
        (os.getpid(), time.time(), "running"),
        (4_000_000, time.time(), "killed"),
        (os.getpid(), psutil.Process().create_time() - 60.0, "killed"),
    ],
    ids=["it lives", "nobody", "a later process"],
)
def test_a_process_of_this_host_is_looked_for(
    make_run: MakeRun, pid: int, started: float, state: str
) -> None:
    entry = {"host": socket.gethostname(), "pid": pid, "started": started}
    assert read_status(make_run(attempts=[entry]))["state"] == state


def test_a_run_continued_here_is_no_job_any_more(slurm: FakeSlurm, make_run: MakeRun) -> None:
    figures = read_status(make_run(attempts=[by("700", "stopped"), {"job_id": None}], jobs=["700"]))
    assert (figures["state"], figures["job"]) == ("running", None)
    assert slurm.calls("squeue") == []


# ------------------------------------------------------------------ progress


def step(number: int, **more: Any) -> dict[str, Any]:
    return {
        "step": number,
        "time/step": 10.0,
        "time/train": 4.0,
        "time/wait_for_batch": 5.0,
        "time/weight_sync_blocking": 0.5,
        "num_rollouts": 16,
        "num_completion_tokens": 100,
        **more,
    }


def test_time_left_is_of_the_median_step_and_is_held_against_the_time_limit(
    slurm: FakeSlurm, make_run: MakeRun
) -> None:
    steps = [step(k) for k in range(3)] + [step(3, **{"time/step": 500.0})]
    run = make_run(attempts=[by("700")], jobs=["700"], steps=steps)
    for seconds, fits in ((300.0, True), (220.0, False)):  # 60 s are left, 180 s for the signal
        end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))
        slurm.answer("squeue", (0, f"700+0|RUNNING|n1|None|N/A|{end}\n", ""))
        figures = read_status(run)
        assert (figures["seconds_per_step"], figures["eta_s"]) == (10.0, 60.0)
        assert figures["fits"] is fits
        assert figures["signal_delay_s"] == 180
        assert abs(figures["job"]["end"] - time.time() - seconds) < 5.0


def test_steps_that_a_resume_threw_away_count_once(make_run: MakeRun) -> None:
    steps = [step(0), step(1), step(2), step(1, attempt=2)]
    entries = [{"outcome": "failed"}, {"resumed_from_step": 1}]
    figures = read_status(make_run(attempts=entries, steps=steps))
    assert (figures["step"], figures["rollouts"], figures["completion_tokens"]) == (2, 32, 200)


def test_where_the_time_went_makes_one(make_run: MakeRun) -> None:
    shares = read_status(make_run(steps=[step(0), step(1)]))["where_time_went"]
    assert shares == {
        "training": 0.4,
        "waiting for rollouts": 0.5,
        "weight sync": 0.05,
        "other": pytest.approx(0.05),
    }


def test_a_folder_that_has_just_been_made_has_a_status(make_run: MakeRun) -> None:
    figures = read_status(make_run())
    assert (figures["state"], figures["step"], figures["eta_s"]) == ("not started", 0, None)
    assert figures["where_time_went"] == {} and figures["attempts"] == []
