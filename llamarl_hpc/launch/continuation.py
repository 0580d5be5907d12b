"""After an attempt in a batch script: who starts the next one, if anybody.

    requeue        the same job again (scontrol requeue)
    resubmission   the same batch script in a new job that waits for the end of this one, where
                   requeueing is refused

The attempt's entry in run.json tells: `continued_by` is "requeue", "resubmission:ID" or empty, and
then `not_continued` says why.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

from llamarl_hpc.config.schema import Config
from llamarl_hpc.errors import (
    EXIT_OK,
    EXIT_USER_ERROR,
    ConfigError,
    NoProgress,
    StoppedBySignal,
)
from llamarl_hpc.launch.own_job import OwnJob
from llamarl_hpc.launch.progress_budget import check_budget
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.slurm_text.job_end import CANCELLED, REQUEUED
from llamarl_hpc.storage.atomic import write_json, write_text

Entry = dict[str, Any]  # of an attempt, in run.json
log = logging.getLogger(__name__)

BY_REQUEUE, BY_RESUBMISSION = "requeue", "resubmission"
# what stops a run for good; anything else that does is Slurm's
_WISHES = ("SIGINT", "SIGHUP", "a stop request", "cancellation", "an alarm")


def started_by(run: RunDir, job: OwnJob | None) -> str:
    """Who started this process: empty, a person; else the continuation of the newest attempt."""
    attempts = run.read_info().get("attempts") or [{}]
    if job is None:
        return ""
    if attempts[-1].get("continued_by") == f"{BY_RESUBMISSION}:{job.job_id}":
        return BY_RESUBMISSION
    if job.restarts and attempts[-1].get("job_id") == job.job_id:
        return BY_REQUEUE
    if job.restarts and attempts[-1].get("continued_by", "").endswith(f":{job.job_id}"):
        return BY_RESUBMISSION
    return ""


def check_wanted(run: RunDir, config: Config, by: str) -> None:
    """Before an attempt that `by` (see `started_by`) begins. A person's start is always wanted, and
    takes back a cancellation. Raises StoppedBySignal after a cancellation, NoProgress."""
    if not by:
        run.stop_requested.unlink(missing_ok=True)
    elif run.stop_requested.exists():
        raise StoppedBySignal(
            "the run was cancelled, so it is not continued; 'llamarl-hpc resume' does it anyway"
        )
    else:
        check_budget(
            run.read_info().get("attempts", []),
            _newest_step(run),
            config.launch.max_attempts_without_progress,
        )


def continue_run(
    run: RunDir, config: Config, entry: Entry, job: OwnJob, save: Callable[[RunDir, Entry], None]
) -> str:
    """Arrange for the next attempt. `entry`: of the attempt that has just ended, complete but for
    what this adds, and not yet written; `save` writes it.

    Returns who continues the run, in words; empty when nobody does. Raises NoProgress.
    """
    entry |= {"continued_by": "", "not_continued": _why_not(run, config, entry)}
    if entry["not_continued"]:
        return ""
    _check_budget(run, config, entry)
    now, wanted = job.look(), config.launch.requeue
    if now is not None and now.ending == CANCELLED:
        return _nobody(entry, f"job {job.job_id} was cancelled")
    refusal = ""
    if wanted != "resubmit" or (now is not None and now.ending == REQUEUED):
        entry["continued_by"] = BY_REQUEUE
        save(run, entry)  # now: the requeue ends this process, too
        refusal = job.requeue()
        if not refusal:
            return f"job {job.job_id} goes back into the queue and continues the run"
        entry["continued_by"] = ""
    if wanted == "requeue":
        return _nobody(entry, refusal)
    return _resubmit(run, entry, job, refusal)


def _why_not(run: RunDir, config: Config, entry: Entry) -> str:
    if entry["exit_code"] == EXIT_OK:
        return "it is done"
    if entry["exit_code"] == EXIT_USER_ERROR:
        return "something is to be mended first"
    if config.launch.requeue == "never":
        return "launch.requeue is never"
    if run.stop_requested.exists():
        return "it was cancelled"
    if any(wish in entry["stopped_by"] for wish in _WISHES):
        return f"it was stopped by {entry['stopped_by']}"
    return ""


def _check_budget(run: RunDir, config: Config, entry: Entry) -> None:
    before = [a for a in run.read_info()["attempts"] if a["number"] != entry["number"]]
    limit = config.launch.max_attempts_without_progress
    try:
        check_budget([*before, entry], _newest_step(run), limit)
    except NoProgress as error:
        _nobody(entry, str(error))
        entry |= {"outcome": "failed", "exit_code": error.exit_code}
        raise


def _resubmit(run: RunDir, entry: Entry, job: OwnJob, refusal: str) -> str:
    script = run.path / "slurm" / f"continue_{entry['number']}.sh"
    try:
        script.parent.mkdir(exist_ok=True)
        write_text(script, job.script())
        submitted = job.resubmit(script, [str(run.config), str(run.path)])
    except ConfigError as error:
        return _nobody(entry, "; ".join(words for words in (refusal, str(error)) if words))
    new = {"id": submitted.job, "cluster": submitted.cluster, "submitted": time.time()}
    info = run.read_info()
    write_json(run.run_json, {**info, "jobs": [*info.get("jobs", []), new]})
    entry["continued_by"] = f"{BY_RESUBMISSION}:{submitted.job}"
    return f"job {submitted.job} continues the run once job {job.job_id} has ended"


def _nobody(entry: Entry, reason: str) -> str:
    log.warning("the run is not continued by itself: %s", reason)
    entry["not_continued"] = reason
    return ""


def _newest_step(run: RunDir) -> int:
    """Of the newest checkpoint; whether it is whole is for the next attempt to see."""
    try:
        return int(json.loads((run.path / "latest.json").read_text())["step"])
    except (OSError, ValueError, KeyError):
        return 0
