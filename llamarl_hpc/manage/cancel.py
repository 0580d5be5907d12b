"""End a run: with a checkpoint, or at once.

First the file `stop` appears in the run folder, so that no attempt continues the run by itself.
Then a job that waits is cancelled, and a controller that runs is signalled: it finishes its step,
writes a checkpoint and ends. Who waits for whom: this waits for the end of the job or process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from llamarl_hpc.errors import ConfigError, LlamarlError
from llamarl_hpc.launch import queue
from llamarl_hpc.manage.jobs import RunningIn, active_jobs, ask_about, is_restarted
from llamarl_hpc.manage.process import is_alive, is_of_this_host, is_running_here
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.slurm_text.job_state import is_waiting

WAIT_S = 600.0


class NotEnded(LlamarlError, TimeoutError):
    """The run was asked to stop and goes on."""


def cancel_run(
    run: RunDir,
    *,
    now: bool = False,
    wait_s: float = WAIT_S,
    tell: Callable[[str], None] = lambda text: None,
) -> str:
    """End the run and say how it ended, in a sentence. `now`: without a checkpoint of its last
    steps. `tell` hears what is being waited for.

    Raises ConfigError when it cannot be reached from here, NotEnded after `wait_s` seconds.
    """
    jobs = active_jobs(run)
    attempt = _last_attempt(run)
    by_hand = {job.job_id for job, _ in jobs if not job.is_ours}
    if is_running_here(run) and attempt.get("job_id") in by_hand:  # a shell of salloc, perhaps
        return _cancel_here(run, attempt, now, wait_s, tell)
    if jobs:
        if now or not all(_is_over(attempt, job, view) for job, view in jobs):
            _request_stop(run)
        return _cancel_jobs(run, jobs, now, wait_s, tell)
    if attempt.get("outcome") == "running" and attempt.get("job_id"):
        return "nothing to cancel: the controller was killed; 'resume' continues the run"
    if attempt.get("outcome") != "running":
        return f"nothing to cancel: the run is {attempt.get('outcome', 'not started')}"
    return _cancel_here(run, attempt, now, wait_s, tell)


def _request_stop(run: RunDir) -> None:
    run.stop_requested.touch()


def _is_over(attempt: dict[str, Any], job: RunningIn, view: queue.JobView) -> bool:
    """The job has made its attempt and has nothing left to do, although Slurm still sees it."""
    is_its = attempt.get("job_id") == job.job_id and attempt.get("outcome") != "running"
    goes_on = attempt.get("continued_by") or is_waiting(view.state) or is_restarted(attempt, view)
    return is_its and not goes_on


def _ended(run: RunDir) -> dict[str, Any]:
    """The last attempt, once nothing goes on. A run that was done before it heard of the
    cancellation is done: nothing is left to stop."""
    attempt = _last_attempt(run)
    if attempt.get("outcome") == "done":
        run.stop_requested.unlink(missing_ok=True)
    return attempt


def _last_attempt(run: RunDir) -> dict[str, Any]:
    return dict((run.read_info().get("attempts") or [{}])[-1])


# ------------------------------------------------------------------ jobs


def _cancel_jobs(
    run: RunDir,
    jobs: list[tuple[RunningIn, queue.JobView]],
    now: bool,
    wait_s: float,
    tell: Callable[[str], None],
) -> str:
    for job, view in reversed(jobs):  # the one that waits for another first
        attempt = _last_attempt(run)
        if _is_over(attempt, job, view) and not now:
            tell(f"job {job.job_id} has done its work and is being closed by Slurm")
            continue
        began = attempt.get("job_id") == job.job_id and attempt.get("outcome") == "running"
        gently = began and not now and not is_waiting(view.state)
        _scancel(job, ["--batch", "--signal=USR2"] if gently else [])
        tell(
            f"job {job.job_id} was told to write a checkpoint and end"
            if gently
            else f"job {job.job_id} ({view.state}) is being cancelled"
        )
    _wait_for_jobs([job for job, _ in jobs], run, wait_s)
    attempt, (job, view) = _ended(run), jobs[-1]
    if attempt.get("job_id") == job.job_id and attempt.get("continued_by"):
        return f"job {job.job_id} is cancelled; it had not gone on"
    if attempt.get("job_id") == job.job_id and attempt.get("outcome") != "running":
        return f"job {job.job_id} has ended: {attempt['reason'] or attempt['outcome']}"
    if attempt.get("job_id") == job.job_id:
        return f"job {job.job_id} was ended at once; 'resume' goes on from the newest checkpoint"
    return f"job {job.job_id} is cancelled; its controller had not begun"


def _scancel(job: RunningIn, options: list[str]) -> None:
    where = [f"--clusters={job.cluster}"] if job.cluster else []
    answer = queue.run_command(["scancel", *where, *options, job.job_id])
    if answer.returncode:
        raise ConfigError(
            f"scancel refused to end job {job.job_id}: {' '.join(answer.stderr.split())}"
        )


def _wait_for_jobs(jobs: list[RunningIn], run: RunDir, wait_s: float) -> None:
    deadline, pause_s = time.monotonic() + wait_s, 0.3
    while True:
        report = ask_about(jobs)
        left = [
            f"job {job.job_id} ({view.state if view else 'no answer from Slurm'})"
            for job in jobs
            if not (view := report.views.get(job.job_id, None)) or not view.has_ended
            if job.job_id not in report.gone
        ]
        if not left:
            return
        if time.monotonic() > deadline:
            raise NotEnded(
                f"{', '.join(left)} has not ended {wait_s:.0f} s after it was told to; see "
                f"'llamarl-hpc logs {run.path}', or cancel it with --now"
            )
        time.sleep(pause_s)
        pause_s = min(5.0, 1.5 * pause_s)


# ------------------------------------------------------------------ a process of this machine


def _cancel_here(
    run: RunDir, attempt: dict[str, Any], now: bool, wait_s: float, tell: Callable[[str], None]
) -> str:
    pid, host = int(attempt["pid"]), attempt["host"]
    if not is_of_this_host(attempt):
        raise ConfigError(f"the controller of this run is process {pid} on {host}; cancel it there")
    if not is_alive(attempt):
        return "nothing to cancel: the controller was killed; 'resume' continues the run"
    _request_stop(run)
    os.kill(pid, signal.SIGINT if now else signal.SIGTERM)
    tell(f"process {pid} was told to {'end' if now else 'write a checkpoint and end'}")
    deadline = time.monotonic() + wait_s
    again = time.monotonic() + 1.0
    while is_alive(attempt):
        if time.monotonic() > deadline:
            raise NotEnded(
                f"process {pid} has not ended {wait_s:.0f} s after it was told to; see "
                f"'llamarl-hpc logs {run.path}', or cancel it with --now"
            )
        if now and time.monotonic() > again:  # the second Ctrl-C ends it at once
            os.kill(pid, signal.SIGINT)
            again = deadline
        time.sleep(0.1)
    last = _ended(run)
    return f"the run has ended: {last['reason'] or last['outcome']}"
