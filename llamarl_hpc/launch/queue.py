"""What Slurm says about jobs: squeue first, then scontrol, and sacct for what both have forgotten.

squeue is live, needs no accounting and knows an ended job for some minutes; so does scontrol, which
answers on sites where squeue shows less; sacct is late and often switched off, but forgets nothing.
A command that fails says nothing about any job: its answer is missing, and its words are kept.
Knows nothing of submitit.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from llamarl_hpc.launch.allocation import outside_allocation
from llamarl_hpc.slurm_text.job_id import JobId, parse_job_id
from llamarl_hpc.slurm_text.job_state import is_final, overall_state, parse_state
from llamarl_hpc.slurm_text.moment import parse_moment
from llamarl_hpc.slurm_text.show_job import parse_job_records

TIMEOUT_S = 60.0
_SQUEUE = ("squeue", "--noheader", "--all", "--states=all", "--format=%i|%T|%N|%r|%S|%e")
_COLUMNS = "--format=JobID,State,NodeList,Submit,Start,End"
_SACCT = ("sacct", "--allocations", "--noheader", "--parsable2", _COLUMNS)
_NO_SUCH_JOB = "Invalid job id"
_NOT_FOUND = 127  # of a command that is not on this machine
_MAX_RECORDS = 16  # jobs that scontrol, which takes them one by one, is asked for at a time


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[[Sequence[str]], Answer]


def run_command(argv: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> Answer:
    """Run one of Slurm's commands as if we were in no job; never raises."""
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=outside_allocation(os.environ),
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(returncode=124, stdout="", stderr=f"no answer in {timeout_s:.0f} s")
    except OSError as error:
        return Answer(returncode=_NOT_FOUND, stdout="", stderr=f"{error.strerror}")
    return Answer(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)


@dataclass(kw_only=True)
class JobView:
    """One job, as one command saw it. Everything is by component; a plain job has 0 only."""

    states: dict[int, str] = field(default_factory=dict)
    nodes: dict[int, str] = field(default_factory=dict)  # node lists
    reasons: dict[int, str] = field(default_factory=dict)  # why it waits, where Slurm says so
    start: float | None = None  # seconds of the epoch; of a job that waits: when Slurm expects it
    end: float | None = None  # of a job that runs: its time limit

    @property
    def state(self) -> str:
        return overall_state(self.states.values())

    @property
    def reason(self) -> str:
        """Of the first component that has one."""
        return next((self.reasons[k] for k in sorted(self.reasons)), "")

    @property
    def has_ended(self) -> bool:
        """No component goes on."""
        return bool(self.states) and all(is_final(state) for state in self.states.values())


@dataclass(frozen=True, kw_only=True)
class Report:
    """Views of the jobs that are known, and what the commands that failed said."""

    views: dict[str, JobView]
    failures: list[str]
    is_complete: bool  # the queue did answer
    gone: frozenset[str] = frozenset()  # it answered, and these are not in it (any more)


def ask(
    jobs: Collection[str], *, since: float, cluster: str = "", run: Run = run_command
) -> Report:
    """Look the jobs (leaders' ids) up. `since`: seconds of the epoch, before all were submitted.

    While squeue fails, no job has ended: what sacct says of an end may be the end of a start that
    has been requeued since. Where there is no squeue at all, sacct's word counts.
    """
    where = [f"--clusters={cluster}"] if cluster else []
    views, failures, is_silent = _ask_squeue(sorted(jobs), where, run)
    is_complete = not failures
    if not is_silent:
        views |= _ask_scontrol(sorted(set(jobs) - set(views)), where, run)
    gone = frozenset(set(jobs) - set(views)) if is_complete else frozenset()
    if missing := sorted(set(jobs) - set(views)):
        found, words = _ask_sacct(missing, since, where, run)
        failures += words
        views |= {j: v for j, v in found.items() if not (is_silent and v.has_ended)}
    return Report(views=views, failures=failures, is_complete=is_complete, gone=gone)


def _ask_squeue(
    jobs: Sequence[str], where: list[str], run: Run
) -> tuple[dict[str, JobView], list[str], bool]:
    """Views; what it said when it failed; whether it is there and failed."""
    answer = run([*_SQUEUE, *where, f"--jobs={','.join(jobs)}"])
    if not answer.returncode:
        rows = _table(answer.stdout, ("state", "nodes", "reason", "start", "end"))
        return _views(rows, jobs), [], False
    if _NO_SUCH_JOB not in answer.stderr:
        return {}, [_said("squeue", answer)], answer.returncode != _NOT_FOUND
    views: dict[str, JobView] = {}
    failures: list[str] = []
    is_silent = False
    for job in jobs if len(jobs) > 1 else []:  # one that is forgotten spoils the whole list
        found, failed, silent = _ask_squeue([job], where, run)
        views |= found
        failures += failed
        is_silent |= silent
    return views, failures, is_silent


def _ask_scontrol(jobs: Sequence[str], where: list[str], run: Run) -> dict[str, JobView]:
    views: dict[str, JobView] = {}
    for job in jobs[:_MAX_RECORDS]:
        answer = run(["scontrol", *where, "show", "job", job])
        if answer.returncode == _NOT_FOUND:
            break
        if not answer.returncode:
            names = {"JobState": "state", "NodeList": "nodes", "Reason": "reason"}
            names |= {"StartTime": "start", "EndTime": "end"}
            records = parse_job_records(answer.stdout)
            rows = ((j, {n: v.get(k, "") for k, n in names.items()}) for j, v in records)
            views |= _views(rows, [job])
    return views


def _ask_sacct(
    jobs: Sequence[str], since: float, where: list[str], run: Run
) -> tuple[dict[str, JobView], list[str]]:
    day = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since))
    answer = run([*_SACCT, *where, f"--starttime={day}", f"--jobs={','.join(jobs)}"])
    rows = list(_table(answer.stdout, ("state", "nodes", "submit", "start", "end")))
    rows.sort(key=lambda row: row[1].get("submit", ""))  # the newest start of a job counts
    views = _views(rows, jobs)
    is_refusal = answer.returncode or (not views and answer.stderr.strip())
    return views, [_said("sacct", answer)] if is_refusal else []


Row = tuple[JobId, dict[str, str]]


def _table(text: str, names: Sequence[str]) -> Iterator[Row]:
    """Rows `id|value|...`; a banner, a header or a rule is no row."""
    for line in text.splitlines():
        id_text, *values = line.split("|")
        job = parse_job_id(id_text)
        if job is not None and len(values) >= 2:
            yield job, dict(zip(names, values, strict=False))


def _views(rows: Iterator[Row] | list[Row], jobs: Collection[str]) -> dict[str, JobView]:
    """Job -> view; of several rows of a component the last counts. Steps and arrays are none."""
    views: dict[str, JobView] = {}
    for job, values in rows:
        if job.step or job.array or job.job not in jobs:
            continue
        view = views.setdefault(job.job, JobView())
        component = job.component or 0
        view.states[component] = parse_state(values["state"])
        view.nodes[component] = values["nodes"]
        if (reason := values.get("reason", "")) not in ("", "None", "(null)"):
            view.reasons[component] = reason
        if component == 0:
            view.start = parse_moment(values.get("start", ""))
            view.end = parse_moment(values.get("end", ""))
    return views


def _said(command: str, answer: Answer) -> str:
    words = " ".join((answer.stderr or answer.stdout).split()) or "nothing"
    return f"{command} failed ({answer.returncode}): {words}"
