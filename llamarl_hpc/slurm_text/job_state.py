"""Job states as squeue and sacct print them, and one state for a job of several components."""

from __future__ import annotations

from collections.abc import Iterable

from llamarl_hpc.slurm_text.job_id import parse_job_id

UNKNOWN = "UNKNOWN"

# Final states, worst first. What is not here goes on: squeue knows more states than sacct
# (SIGNALING, STAGE_OUT, REQUEUE_HOLD, ...), and a new one must not be taken for an end.
FINAL = (
    "NODE_FAIL",
    "BOOT_FAIL",
    "OUT_OF_MEMORY",
    "FAILED",
    "DEADLINE",
    "TIMEOUT",
    "PREEMPTED",
    "CANCELLED",
    "REVOKED",
    "COMPLETED",
)
_GOING_ON = (
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "SPECIAL_EXIT",
    "STAGE_OUT",
    "SIGNALING",
    "STOPPED",
    "SUSPENDED",
    "RESIZING",
    "COMPLETING",
    "RUNNING",
    "CONFIGURING",
    "PENDING",
    "RESV_DEL_HOLD",
)
_WAITING = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}


def parse_state(text: str) -> str:
    """`CANCELLED by 1001` -> CANCELLED, `OUT_OF_ME+` -> OUT_OF_MEMORY; UNKNOWN for nothing.

    A word that Slurm may add one day is kept as it is.
    """
    words = text.split()
    if not words:
        return UNKNOWN
    word = words[0].upper()
    if not word.endswith("+"):
        return word
    known = [state for state in (*FINAL, *_GOING_ON) if state.startswith(word[:-1])]
    return known[0] if len(known) == 1 else word[:-1]


def is_final(state: str) -> bool:
    """Whether a job in this state has ended."""
    return state in FINAL


def is_waiting(state: str) -> bool:
    """Whether a job in this state has no nodes (any more, or yet)."""
    return state in _WAITING


def has_failed(state: str) -> bool:
    """Whether a component in this state is an end that nobody wished for."""
    return state in FINAL and state != "COMPLETED"


def overall_state(states: Iterable[str]) -> str:
    """One state for all components: the worst end if there is one, else the furthest from an end.

    A component that has failed decides although others go on: the job cannot do its work any more.
    """
    found = list(states)
    failed = [state for state in FINAL[:-1] if state in found]
    if failed:
        return failed[0]
    going_on = [state for state in found if not is_final(state)]
    if not going_on:
        return "COMPLETED" if found else UNKNOWN
    return next((state for state in _GOING_ON if state in going_on), going_on[0])


def component_states(rows: Iterable[tuple[str, str]]) -> dict[str, dict[int, str]]:
    """(id, state) rows of a table -> job -> component -> state; a plain job has component 0.

    Rows of steps say nothing about the job: our own helpers may be cancelled in a run that went
    well.
    """
    found: dict[str, dict[int, str]] = {}
    for id_text, state_text in rows:
        job = parse_job_id(id_text)
        if job is not None and not job.step and not job.array:
            found.setdefault(job.job, {})[job.component or 0] = parse_state(state_text)
    return found
