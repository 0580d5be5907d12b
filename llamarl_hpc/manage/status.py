"""What a run is doing: from its folder and, where it is a Slurm job, from the queue.

The folder decides what it can decide: how an attempt ended stands there. Slurm is asked while an
attempt says that it runs, or has not begun. A question that Slurm does not answer changes nothing
and becomes a warning. Loads no torch; works on any machine that sees the folder.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict
from statistics import median
from typing import Any

from analysis.lineage import Attempt, current_events, current_metrics
from llamarl_hpc.errors import RunDirError
from llamarl_hpc.launch import queue
from llamarl_hpc.manage.jobs import (
    ROLES,
    RunningIn,
    ask_about,
    component_names,
    has_slurm,
    is_restarted,
    newest_job,
)
from llamarl_hpc.manage.process import is_alive, is_of_this_host
from llamarl_hpc.observability.json_lines import read_json_lines
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.slurm_text.job_state import is_waiting
from llamarl_hpc.slurm_text.pending_reason import explain

_NUM_STEPS = 10  # the newest ones, of which the median says how long a step takes
_FULL_BYTES = 1 << 20  # with less, nothing more can be written
_REQUEUED = "requeue"  # `continued_by` of an attempt; launch/continuation.py loads the schema
_KILLED = "its process is gone without a word"


def read_status(run: RunDir, *, ask_slurm: bool = True) -> dict[str, Any]:
    """Figures of a run: plain values, for JSON.

    `state` is one of: not started, queued, starting, running, done, stopped, failed, killed.
    Times are seconds; moments are seconds of the epoch; what is not known is None.
    """
    attempts = run.read_info().get("attempts", [])
    last: dict[str, Any] = attempts[-1] if attempts else {}
    settings = run.read_config()
    job, view, warnings = _ask(run, ask_slurm)
    state, reason = _state(last, job, view)
    lines = read_json_lines(run.metrics)
    lineage = [Attempt.from_info(entry) for entry in attempts]
    figures = {
        "run": str(run.path),
        "state": state,
        "reason": reason,
        "attempt": last.get("number", 0),
        "host": last.get("host"),
        "continued_by": last.get("continued_by") or "",
        "not_continued": last.get("not_continued") or "",
        "stop_requested": run.stop_requested.exists(),
        "now": _now(run, last, lines) if state == "running" else "",
        "last_sign_s": _last_sign_s(run, last) if state in ("running", "starting") else None,
        "job": None if job is None else _job(run, job, view),
        "attempts": [_attempt(entry) for entry in attempts],
        "warnings": warnings,
        **_progress(lines, lineage, _max_steps(run, settings)),
    }
    delay_s = (settings.get("launch") or {}).get("signal_delay_s") if job is not None else None
    return figures | {"signal_delay_s": delay_s, "fits": _fits(figures, settings)}


# ------------------------------------------------------------------ Slurm


def _ask(run: RunDir, ask_slurm: bool) -> tuple[RunningIn | None, queue.JobView | None, list[str]]:
    """The newest job; what Slurm says of it, an empty view when it does not know it; complaints."""
    job = newest_job(run)
    if job is None or not ask_slurm:
        return job, None, []
    if not has_slurm():
        return job, None, ["there is no Slurm on this machine: how the job is was not asked"]
    report = ask_about([job])
    if job.job_id in report.views:
        return job, report.views[job.job_id], []
    if report.gone:
        return job, queue.JobView(), []
    return job, None, [f"Slurm does not say how the job is: {'; '.join(report.failures)}"]


def _job(run: RunDir, job: RunningIn, view: queue.JobView | None) -> dict[str, Any]:
    view = view or queue.JobView()
    is_plain = len(view.states) <= 1
    by_hand = dict(enumerate(ROLES))
    names = {0: "all executors"} if is_plain else component_names(run, job.job_id) or by_hand
    waits = bool(view.states) and is_waiting(view.state)
    components: list[dict[str, Any]] = [
        {
            "component": number,
            "name": names.get(number, f"component {number}"),
            "state": view.states[number],
            "nodes": view.nodes.get(number, ""),
            "reason": view.reasons.get(number, "") if is_waiting(view.states[number]) else "",
        }
        for number in sorted(view.states)
    ]
    for component in components:
        component["because"] = explain(component["reason"])
    return {
        **asdict(job),
        "state": view.state if view.states else None,
        "components": components,
        "expected_start": view.start if waits else None,
        "end": None if waits else view.end,
    }


# ------------------------------------------------------------------ state


def _state(
    attempt: dict[str, Any], job: RunningIn | None, view: queue.JobView | None
) -> tuple[str, str]:
    """State in a word, and why."""
    outcome, reason = attempt.get("outcome", "not started"), attempt.get("reason", "")
    if job is None:
        return _state_here(attempt, outcome, reason)
    began = attempt.get("job_id") == job.job_id  # this job has made an attempt
    if view is None:  # nobody can tell more than the folder
        return (outcome, reason) if began else ("queued", "")
    if not view.states:  # Slurm has forgotten the job, so it has ended
        return _after(attempt, outcome, reason, began, f"Slurm knows job {job.job_id} no more")
    if view.has_ended:
        words = f"job {job.job_id} ended as {view.state}"
        return _after(attempt, outcome, reason, began, words)
    if is_waiting(view.state):
        return "queued", explain(view.reason)
    if not began or is_restarted(attempt, view):
        return "starting", ""
    return outcome, reason


def _after(
    attempt: dict[str, Any], outcome: str, reason: str, began: bool, words: str
) -> tuple[str, str]:
    """Once the job has ended."""
    if began and attempt.get("continued_by") == _REQUEUED:
        return outcome, f"{words} before it went on; before: {reason or outcome}"
    if began:
        return ("killed", words) if outcome == "running" else (outcome, reason)
    if not attempt:
        return "not started", f"{words} before its controller began"
    return outcome, f"{words} before its controller began; before: {reason or outcome}"


def _state_here(attempt: dict[str, Any], outcome: str, reason: str) -> tuple[str, str]:
    """Of a run without a job: its process can be looked for on its own machine."""
    if outcome == "running" and is_of_this_host(attempt) and not is_alive(attempt):
        return "killed", _KILLED
    return outcome, reason


# ------------------------------------------------------------------ progress


def _max_steps(run: RunDir, settings: dict[str, Any]) -> int:
    number = (settings.get("trainer") or {}).get("max_steps")
    if not isinstance(number, int):
        raise RunDirError(f"{run.config} is damaged (trainer.max_steps is {number!r}); mend it")
    return number


def _progress(
    lines: list[dict[str, Any]], lineage: list[Attempt], max_steps: int
) -> dict[str, Any]:
    steps = current_metrics(lines, lineage)
    newest: dict[str, Any] = steps[-1] if steps else {}
    done = newest.get("step", -1) + 1
    seconds = [s for line in steps[-_NUM_STEPS:] if (s := line.get("time/step")) is not None]
    per_step = median(seconds) if seconds else None
    return {
        "step": done,
        "max_steps": max_steps,
        "policy_version": newest.get("policy_version", 0),
        "reward": newest.get("reward/mean"),
        "staleness": newest.get("staleness/mean"),
        "accuracy": _accuracy(current_events(lines, lineage, "eval")),
        "rollouts": int(sum(line.get("num_rollouts") or 0 for line in steps)),
        "completion_tokens": int(sum(line.get("num_completion_tokens") or 0 for line in steps)),
        "seconds_per_step": per_step,
        "eta_s": None if per_step is None else per_step * max(0, max_steps - done),
        "where_time_went": _shares(steps[-_NUM_STEPS:]),
        "idle": {k.removeprefix("idle_ratio/"): v for k, v in newest.items() if "idle_" in k},
        "time": {k.removeprefix("time/"): v for k, v in newest.items() if k.startswith("time/")},
    }


def _shares(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Of the trainer's time in these steps; they make one."""
    names = {
        "training": "time/train",
        "waiting for rollouts": "time/wait_for_batch",
        "weight sync": "time/weight_sync_blocking",
    }
    total = sum(line.get("time/step") or 0.0 for line in steps)
    if not total:
        return {}
    shares = {
        name: sum(line.get(key) or 0.0 for line in steps) / total for name, key in names.items()
    }
    return shares | {"other": max(0.0, 1.0 - sum(shares.values()))}


def _accuracy(evaluations: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [
        {
            "policy_version": line["policy_version"],
            "accuracy": line["eval/heldout/num_correct"] / line["eval/heldout/num_prompts"],
        }
        for line in evaluations
    ]


def _attempt(entry: dict[str, Any]) -> dict[str, Any]:
    keys = ("number", "outcome", "reason", "job_id", "host", "started", "ended", "continued_by")
    return {key: entry.get(key) for key in keys}


def _last_sign_s(run: RunDir, attempt: dict[str, Any]) -> float | None:
    """Seconds since the controller wrote anything."""
    number = attempt.get("number", 0)
    files = [run.metrics, run.log(number, "controller", 0), run.trace_file(number, "controller")]
    times = [file.stat().st_mtime for file in files if file.exists()]
    times += [float(attempt["started"])] if "started" in attempt else []
    return max(0.0, time.time() - max(times)) if times else None


def _now(run: RunDir, attempt: dict[str, Any], lines: list[dict[str, Any]]) -> str:
    """Why a run that goes on does not train; empty while it does, as far as is known."""
    free = shutil.disk_usage(run.path).free  # too little for the event, too, perhaps
    own = [line for line in lines if line.get("attempt") == attempt.get("number")]
    last: dict[str, Any] = next(
        (line for line in reversed(own) if "step" in line or "disk/waiting" in line), {}
    )
    if last.get("disk/waiting"):
        since = time.strftime("%H:%M:%S", time.localtime(last["time"]))
        return f"waits for space on {run.path} since {since}, {free / 1e6:,.1f} MB are free"
    return f"waits for space on {run.path}, nothing is free" if free < _FULL_BYTES else ""


def _fits(figures: dict[str, Any], settings: dict[str, Any]) -> bool | None:
    """Whether the remaining steps end before Slurm sends the signal that ends the attempt."""
    end = (figures["job"] or {}).get("end")
    if figures["state"] != "running" or end is None or figures["eta_s"] is None:
        return None
    delay_s = (settings.get("launch") or {}).get("signal_delay_s", 0)
    return bool(time.time() + figures["eta_s"] < end - delay_s)
