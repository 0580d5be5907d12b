"""What Slurm says about jobs: squeue first, and sacct for those that squeue has forgotten.

squeue is live, needs no accounting and knows an ended job for some minutes; sacct is late and often
switched off, but forgets nothing. A command that fails says nothing about any job: its answer is
missing, and its words are kept. Knows nothing of submitit.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from llamarl_hpc.placement import outside_allocation
from llamarl_hpc.slurm_text.job_id import parse_job_id
from llamarl_hpc.slurm_text.job_state import is_final, overall_state, parse_state

_TIMEOUT_S = 60.0
_SQUEUE = ("squeue", "--noheader", "--all", "--states=all", "--format=%i|%T|%N|%r")
_SACCT = ("sacct", "--allocations", "--noheader", "--parsable2", "--format=JobID,State,NodeList")
_NO_SUCH_JOB = "Invalid job id"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[[Sequence[str]], Answer]


def run_command(argv: Sequence[str]) -> Answer:
    """Run one of Slurm's commands as if we were in no job; never raises."""
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            env=outside_allocation(os.environ),
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(returncode=124, stdout="", stderr=f"no answer in {_TIMEOUT_S:.0f} s")
    except OSError as error:
        return Answer(returncode=127, stdout="", stderr=f"{error.strerror}")
    return Answer(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)


@dataclass(kw_only=True)
class JobView:
    """One job, as one command saw it."""

    states: dict[int, str] = field(default_factory=dict)  # by component; a plain job has 0 only
    nodes: dict[int, str] = field(default_factory=dict)  # node lists
    reason: str = ""  # why it waits, as Slurm says it

    @property
    def state(self) -> str:
        return overall_state(self.states.values())

    @property
    def has_ended(self) -> bool:
        """No component goes on."""
        return bool(self.states) and all(is_final(state) for state in self.states.values())


@dataclass(frozen=True, kw_only=True)
class Report:
    """Views of the jobs that are known, and what the commands that failed said."""

    views: dict[str, JobView]
    failures: list[str]
    is_complete: bool  # squeue did answer: a job that is missing is not in the queue


def ask(
    jobs: Collection[str], *, since: float, cluster: str = "", run: Run = run_command
) -> Report:
    """Look the jobs (leaders' ids) up. `since`: seconds of the epoch, before all were submitted."""
    where = [f"--clusters={cluster}"] if cluster else []
    views, failures = _ask_squeue(sorted(jobs), where, run)
    is_complete = not failures
    if missing := sorted(set(jobs) - set(views)):
        day = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since))
        answer = run([*_SACCT, *where, f"--starttime={day}", f"--jobs={','.join(missing)}"])
        if answer.returncode:
            failures.append(_said("sacct", answer))
        views |= {job: view for job, view in _views(answer.stdout).items() if job in missing}
    return Report(views=views, failures=failures, is_complete=is_complete)


def _ask_squeue(
    jobs: Sequence[str], where: list[str], run: Run
) -> tuple[dict[str, JobView], list[str]]:
    answer = run([*_SQUEUE, *where, f"--jobs={','.join(jobs)}"])
    if not answer.returncode:
        return {job: view for job, view in _views(answer.stdout).items() if job in jobs}, []
    if _NO_SUCH_JOB not in answer.stderr:
        return {}, [_said("squeue", answer)]
    views: dict[str, JobView] = {}
    failures: list[str] = []
    for job in jobs if len(jobs) > 1 else []:  # one that is forgotten spoils the whole list
        found, failed = _ask_squeue([job], where, run)
        views |= found
        failures += failed
    return views, failures


def _views(table: str) -> dict[str, JobView]:
    """Rows `id|state|nodes[|reason]` -> job -> view; rows of steps and arrays are left out."""
    views: dict[str, JobView] = {}
    for line in table.splitlines():
        id_text, *values = line.split("|")
        job = parse_job_id(id_text)
        if job is None or job.step or job.array or len(values) < 2:
            continue
        view = views.setdefault(job.job, JobView())
        component = job.component or 0
        view.states[component] = parse_state(values[0])
        view.nodes[component] = values[1]
        if len(values) > 2 and values[2] not in ("", "None"):
            view.reason = values[2]
    return views


def _said(command: str, answer: Answer) -> str:
    words = " ".join((answer.stderr or answer.stdout).split()) or "nothing"
    return f"{command} failed ({answer.returncode}): {words}"
