"""What scontrol says of a job that runs, ends, is requeued, or only half of it."""

from __future__ import annotations

import time

import pytest

from llamarl_hpc.slurm_text.job_end import component_records, job_now

RUNNING = {0: "RUNNING", 1: "RUNNING", 2: "RUNNING"}


def table(
    states: dict[int, str], *, end: str = "2026-12-01T03:42:52", **changes: dict[int, str]
) -> str:
    """`scontrol show job 700` of Slurm 22.05, shortened. `changes`: key -> component -> value."""
    records = []
    for k, state in states.items():
        own = {key: values[k] for key, values in changes.items() if k in values}
        values = {
            "Reason": "None",
            "Requeue": "1",
            "Restarts": "0",
            "EndTime": end,
            "PreemptTime": "None",
        } | own
        records.append(
            f"JobId={700 + k} HetJobId=700 HetJobOffset={k} JobName=a EndTime=x\n"
            f"   JobState={state} Reason={values['Reason']} Dependency=(null)\n"
            f"   Requeue={values['Requeue']} Restarts={values['Restarts']} BatchFlag=1\n"
            f"   StartTime=2026-12-01T03:37:52 EndTime={values['EndTime']} Deadline=N/A\n"
            f"   PreemptEligibleTime=2026-12-01T03:37:52 PreemptTime={values['PreemptTime']}\n"
            "   Command=/r/EndTime=2000-01-01T00:00:00 x\n"
        )
    return "\n".join(records)


def now(text: str, restarts: int = 0):  # type: ignore[no-untyped-def]
    found = job_now(component_records(text), dict.fromkeys(range(3), restarts))
    assert found is not None
    return found


def test_a_running_job_ends_with_the_component_that_ends_first() -> None:
    seen = now(table(RUNNING, EndTime={1: "2026-12-01T03:40:00"}))
    assert seen.end == 1796096400.0
    assert time.gmtime(seen.end)[:6] == (2026, 12, 1, 3, 40, 0)  # asked in UTC
    assert (seen.ending, dict(seen.lost), seen.preempted) == ("", {}, False)


@pytest.mark.parametrize("text", ["Unknown", "NONE", "None", "N/A", "UNLIMITED", "(null)", ""])
def test_a_job_without_an_end_has_none(text: str) -> None:
    assert now(table({0: "RUNNING"}, end=text)).end is None


def test_a_preempted_job_runs_for_as_long_as_its_end_says() -> None:
    seen = now(table(RUNNING, PreemptTime=dict.fromkeys(RUNNING, "2026-12-01T03:38:38")))
    assert seen.preempted and not seen.ending


def test_a_component_that_ended_alone_is_lost_and_why() -> None:
    states = RUNNING | {1: "COMPLETING"}
    assert dict(now(table(states)).lost) == {1: "cancellation"}
    assert dict(now(table(states, Reason={1: "NodeDown"})).lost) == {1: "node failure"}
    assert dict(now(table(RUNNING | {2: "OUT_OF_MEMORY"})).lost) == {2: "out of memory"}


@pytest.mark.parametrize(
    ("states", "changes", "ending"),
    [
        (dict.fromkeys(RUNNING, "COMPLETING"), {}, "cancellation"),
        (dict.fromkeys(RUNNING, "COMPLETING"), {"Restarts": {0: "1"}}, "requeue"),
        (dict.fromkeys(RUNNING, "COMPLETING"), {"Reason": {0: "TimeLimit"}}, "time limit"),
        ({0: "COMPLETING", 1: "NODE_FAIL", 2: "COMPLETED"}, {}, "node failure"),
        ({0: "PREEMPTED"}, {}, "preemption"),
        ({0: "CANCELLED"}, {}, "cancellation"),
    ],
)
def test_why_a_job_ends_is_put_together(
    states: dict[int, str], changes: dict[str, dict[int, str]], ending: str
) -> None:
    assert now(table(states, **changes)).ending == ending


@pytest.mark.parametrize("rest", ["RUNNING", "COMPLETING", "COMPLETED"])
def test_a_job_that_is_requeued_in_part_is_recognised(rest: str) -> None:
    half = {0: "COMPLETING", 1: "PENDING", 2: rest}
    seen = now(table(half, Restarts={0: "1", 1: "1"}))
    assert seen.ending == "requeue" and seen.is_half_requeued
    whole = now(table(dict.fromkeys(RUNNING, "PENDING"), Restarts=dict.fromkeys(RUNNING, "1")))
    assert whole.ending == "requeue" and not whole.is_half_requeued


def test_a_job_that_was_requeued_before_this_start_is_running() -> None:
    seen = now(table(RUNNING, Restarts=dict.fromkeys(RUNNING, "2")), restarts=2)
    assert seen.ending == ""


def test_nothing_is_known_of_a_job_without_records() -> None:
    assert job_now(component_records("slurm_load_jobs error\n"), {}) is None
