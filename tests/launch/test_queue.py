"""What several commands of Slurm, each with its moods, say together about jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from llamarl_hpc.launch import queue

Answers = dict[str, tuple[int, str, str]]
GONE = (1, "", "slurm_load_jobs error: Invalid job id specified")
DOWN = (1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
DISABLED = (1, "", "Slurm accounting storage is disabled")
MISSING = (127, "", "No such file or directory")


def answering(answers: Answers) -> tuple[queue.Run, list[str]]:
    """A `Run`, and which commands it was called with."""
    called: list[str] = []

    def run(argv: Sequence[str]) -> queue.Answer:
        called.append(argv[0])
        code, out, err = answers.get(argv[0], MISSING)
        return queue.Answer(returncode=code, stdout=out, stderr=err)

    return run, called


@pytest.fixture
def ask() -> Callable[..., queue.Report]:
    def ask(job: str = "700", **answers: tuple[int, str, str]) -> queue.Report:
        return queue.ask([job], since=0.0, run=answering(answers)[0])

    return ask


Ask = Callable[..., queue.Report]


def test_squeue_alone_is_asked_when_it_knows_the_job() -> None:
    run, called = answering({"squeue": (0, "700+0|RUNNING|n1|None|2026-12-01T03:00:00|N/A\n", "")})
    view = queue.ask(["700"], since=0.0, run=run).views["700"]
    assert (view.states, view.nodes, view.reasons) == ({0: "RUNNING"}, {0: "n1"}, {})
    assert view.start is not None and view.end is None
    assert called == ["squeue"]


def test_scontrol_is_asked_before_sacct() -> None:
    record = "JobId=700 HetJobId=700 HetJobOffset=0 JobName=x\n   JobState=FAILED Reason=None\n"
    record += "\nJobId=701 HetJobId=700 HetJobOffset=1 JobName=x\n   JobState=CANCELLED\n"
    run, called = answering({"squeue": GONE, "scontrol": (0, record, "")})
    report = queue.ask(["700"], since=0.0, run=run)
    assert report.views["700"].states == {0: "FAILED", 1: "CANCELLED"}
    assert called == ["squeue", "scontrol"] and not report.gone


def test_of_several_starts_in_accounting_the_newest_counts(ask: Ask) -> None:
    rows = [
        "700+0|PENDING||2026-12-01T05:00:00|Unknown|Unknown",
        "700+0|REQUEUED|n1|2026-12-01T03:00:00|2026-12-01T03:00:01|2026-12-01T03:10:00",
        "700+0|CANCELLED by 1000|n1|2026-12-01T04:00:00|2026-12-01T04:00:01|2026-12-01T04:10:00",
        "700+0.batch|FAILED|n1|2026-12-01T06:00:00|2026-12-01T06:00:01|2026-12-01T06:10:00",
    ]
    report = ask(squeue=GONE, scontrol=GONE, sacct=(0, "\n".join(rows), ""))
    assert report.views["700"].states == {0: "PENDING"}


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", "PREEMPTED", "NODE_FAIL", "TIMEOUT"])
def test_no_end_is_believed_while_the_queue_is_silent(ask: Ask, state: str) -> None:
    for silence in (DOWN, (124, "", "no answer in 60 s"), (1, "", "")):
        report = ask(squeue=silence, sacct=(0, f"700+0|{state}|n1\n", ""))
        assert report.views == {} and not report.is_complete and not report.gone
        assert len(report.failures) == 1
    running = ask(squeue=DOWN, sacct=(0, "700+0|RUNNING|n1\n", ""))
    assert running.views["700"].state == "RUNNING"


def test_where_there_is_no_squeue_accounting_counts(ask: Ask) -> None:
    assert ask(sacct=(0, "700|COMPLETED|n1\n", "")).views["700"].state == "COMPLETED"


@pytest.mark.parametrize(
    "sacct",
    [
        DISABLED,
        (0, "", "SLURM accounting storage is disabled\n"),
        (1, "", "sacct: error: Problem talking to the database: Connection refused"),
        (124, "", "no answer in 60 s"),
        (0, "Welcome to the cluster\n", "sacct: error: slurm_persist_conn_open failed"),
        MISSING,
    ],
)
def test_a_job_that_only_a_silent_sacct_could_know_is_gone(
    ask: Ask, sacct: tuple[int, str, str]
) -> None:
    report = ask(squeue=(0, "", ""), scontrol=GONE, sacct=sacct)
    assert report.gone == {"700"} and report.is_complete and report.views == {}
    (complaint,) = report.failures
    assert complaint.startswith("sacct failed")


def test_accounting_that_lags_does_not_hide_that_the_queue_has_forgotten_a_job(ask: Ask) -> None:
    report = ask(squeue=GONE, scontrol=GONE, sacct=(0, "700+0|RUNNING|n1\n", ""))
    assert report.views["700"].state == "RUNNING" and report.gone == {"700"}


@pytest.mark.parametrize(
    ("table", "states"),
    [
        ("CLUSTER: tiger\n700+0|RUNNING|n1|None\n", {0: "RUNNING"}),
        ("*** maintenance | on monday ***\n700|RUNNING|n1|None\n", {0: "RUNNING"}),
        (
            "700+0|SPECIAL_EXIT|n1|None\n700+1|PENDING||BeginTime\n",
            {0: "SPECIAL_EXIT", 1: "PENDING"},
        ),
        ("700+0.0|FAILED|n1|None\n700+0|RUNNING|n1|None\n", {0: "RUNNING"}),
        ("700_1|FAILED|n1|None\n", None),
        ("7000|FAILED|n1|None\n", None),
        ("700+0\n", None),
    ],
)
def test_odd_tables_are_read(ask: Ask, table: str, states: dict[int, str] | None) -> None:
    view = ask(squeue=(0, table, ""), scontrol=GONE, sacct=DISABLED).views.get("700")
    assert (None if view is None else view.states) == states


def test_many_forgotten_jobs_do_not_ask_scontrol_for_each() -> None:
    run, called = answering({"squeue": (0, "", ""), "scontrol": GONE, "sacct": DISABLED})
    queue.ask([f"{k}" for k in range(100)], since=0.0, run=run)
    assert called.count("scontrol") == 16 and called.count("sacct") == 1


def test_a_command_that_hangs_is_no_answer() -> None:
    answer = queue.run_command(["sleep", "5"], timeout_s=0.05)
    assert answer.returncode == 124 and answer.stderr == "no answer in 0 s"
