"""What scontrol prints of a job, why a job waits, and Slurm's way to write a moment."""

from __future__ import annotations

import time

import pytest

from llamarl_hpc.slurm_text.moment import parse_moment
from llamarl_hpc.slurm_text.pending_reason import explain
from llamarl_hpc.slurm_text.show_job import parse_job_records

HET = """JobId=700 HetJobId=700 HetJobOffset=0 JobName=a JobState=COMPLETED b
   HetJobIdSet=700-701
   UserId=me(1000) GroupId=me(1000) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=0 Restarts=1 BatchFlag=1 Reboot=0 ExitCode=0:0
   StartTime=2026-12-01T03:36:30 EndTime=Unknown Deadline=N/A
   NodeList=node[1-2]
   BatchHost=node1
   Command=/runs/it's a=b c/slurm/.submission_file_1.sh
   StdOut=/runs/it's a=b c/slurm/700_0_log.out

JobId=701 HetJobId=700 HetJobOffset=1 JobName=x
   JobState=PENDING Reason=Resources Dependency=(null)
   NodeList=(null)
"""


def test_scontrols_records_are_read_by_component() -> None:
    (first, a), (second, b) = parse_job_records(HET)
    assert (first.job, first.component, second.job, second.component) == ("700", 0, "700", 1)
    assert (a["JobState"], b["JobState"]) == ("RUNNING", "PENDING")  # not what the name says
    assert a["StdOut"] == "/runs/it's a=b c/slurm/700_0_log.out"
    assert a["NodeList"] == "node[1-2]" and "NodeList" not in b
    assert b["Reason"] == "Resources" and "Reason" not in a and a["Restarts"] == "1"


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("JobId=7 PackJobId=6 PackJobOffset=1 JobName=x\n   JobState=FAILED\n", [("6", 1)]),
        ("JobId=9 JobName=x\n   JobState=RUNNING\n", [("9", None)]),
        ("JobId=9 ArrayJobId=8 ArrayTaskId=1 JobName=x\n   JobState=RUNNING\n", []),
        ("Welcome to our cluster\n\nJobId=9 JobName=x\n   JobState=RUNNING\n", [("9", None)]),
        ("slurm_load_jobs error: Invalid job id specified", []),
        ("", []),
    ],
)
def test_other_records(text: str, ids: list[tuple[str, int | None]]) -> None:
    assert [(job.job, job.component) for job, _ in parse_job_records(text)] == ids


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Priority", "jobs with a higher priority come first"),
        ("(Resources)", "the nodes it asks for are in use"),
        ("QOSMaxCpuPerUserLimit", "a user's limit of the QoS on CPUs is reached"),
        ("AssocGrpGRES", "the limit of all its jobs of the account on GPUs is reached"),
        ("QOSMaxJobsPerUserLimit", "a user's limit of the QoS on jobs is reached"),
        ("AssocMaxWallDurationPerJobLimit", "the limit for one job of the account on time"),
        ("QOSMinGRES", "it asks for less GPUs than the limit of the QoS wants"),
        ("MaxMemPerLimit", "the limit on memory is reached"),
        ("ReqNodeNotAvail, UnavailableNodes:node[3-4]", "nodes that it needs are down"),
        ("ReqNodeNotAvail,_UnavailableNodes:node3", "nodes that it needs are down"),
        ("Nodes_required_for_job_are_DOWN,_DRAINED", ""),
        ("DependencyNeverSatisfied", "the job that it waits for did not end as wanted"),
        ("BeginTime", "after a requeue that is two minutes"),
        ("launch failed requeued held", "scontrol release JOB"),
        ("SomethingNew", ""),
        ("Maximal", ""),
        ("", ""),
    ],
)
def test_reasons_are_told_in_plain_words(reason: str, words: str) -> None:
    assert words in explain(reason)
    assert bool(explain(reason)) == bool(words)


def test_moments_are_of_this_machines_zone() -> None:
    now = float(int(time.time()))
    text = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now))
    assert parse_moment(text) == now
    for nothing in ("", "N/A", "Unknown", "NONE", "(null)", "tomorrow"):
        assert parse_moment(nothing) is None
