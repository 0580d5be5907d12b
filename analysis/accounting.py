"""Is every prompt group accounted for? Each issued one must have ended in exactly one status."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from analysis.current_groups import TRAINED
from analysis.read_run import Run
from llamarl_hpc.errors import RunDirError, StoreError
from llamarl_hpc.storage.rollout_store.layout import Block
from llamarl_hpc.types import Array

_COLUMNS = ("group_id", "status", "reason", "step", "staleness", "num_rollouts", "attempt")
_MAX_NAMED = 8  # numbers in one sentence


@dataclass(frozen=True, kw_only=True, slots=True)
class Accounting:
    """What became of the training groups of a run, as it stands now."""

    num_issued: int  # group ids 0 .. num_issued - 1 have been handed out, as far as is known
    counts: dict[str, int]  # by status
    reasons: dict[str, int]  # of dropped and abandoned ones, "status: reason"
    in_flight: list[int]  # not resolved yet: the run goes on, or can be resumed and issue them
    num_superseded: int  # rows of earlier attempts that a resume threw away
    num_rollouts: int
    violations: list[str] = field(default_factory=list)  # sentences; empty when all is well

    @property
    def is_sound(self) -> bool:
        return not self.violations


def accounting(run: Run) -> Accounting:
    """Count the groups of purpose `train` in the current lineage."""
    everything = run.group_mask(lineage="all", purpose="train")
    current = run.group_mask(purpose="train")
    rows = run.table("groups", _COLUMNS, current)
    ids = rows["group_id"]
    known = run.table("groups", ["group_id", "attempt"], everything)
    num_issued = int(known["group_id"].max(initial=-1)) + 1
    missing = np.setdiff1d(np.arange(num_issued), ids)
    waiting = missing[_rewound(missing, known)] if run.has_ended else missing
    lost = np.setdiff1d(missing, waiting)
    violations = [*run.store.problems, *_configuration(run), *_twice(ids, rows["status"])]
    if len(lost):
        violations.append(f"{_named(lost)} issued and never resolved, though the run has ended")
    violations += _trained_rows(run, rows)
    violations += _unstored(run, rows)
    violations += _unexplained(run, rows)
    statuses = Counter(run.decoded("status", rows["status"]))
    return Accounting(
        num_issued=num_issued,
        counts=dict(statuses.most_common()),
        reasons=_reasons(run, rows),
        in_flight=waiting.tolist(),
        num_superseded=int(everything.sum() - current.sum()),
        num_rollouts=int(rows["num_rollouts"].sum()),
        violations=violations,
    )


def _configuration(run: Run) -> list[str]:
    """Without it, some of what follows cannot be told."""
    try:
        run.dir.read_config()
    except RunDirError as error:
        return [str(error)]
    return []


def check_files(run: Run) -> list[str]:
    """Read every file whole, compare checksums, check the inner order: what is wrong, by file."""
    found: list[str] = []
    for _, file in run.store.scan():
        try:
            found += file.checked_block()[1]
        except StoreError as error:
            found.append(str(error))
    return found


def _rewound(missing: Array, known: Block) -> Array:
    """bool: groups that a resume threw away and that the run, when it ended, had not issued again.

    Groups are issued in order: an attempt that resolved a later one had issued those before it.
    """
    ids, attempts = known["group_id"], known["attempt"]
    last = [attempts[ids == group].max(initial=-1) for group in missing]
    reached = [ids[attempts > attempt].max(initial=-1) for attempt in last]
    return (np.array(last) >= 0) & (np.array(reached) < missing)


def _twice(ids: Array, status: Array) -> list[str]:
    unique, counts = np.unique(ids, return_counts=True)
    twice = unique[counts > 1]
    return [f"{_named(twice)} trained more than once"] if len(twice) else []


def _trained_rows(run: Run, rows: Block) -> list[str]:
    trained = rows["status"] == TRAINED
    found = []
    steps = np.unique(rows["step"][trained])
    gaps = np.setdiff1d(np.arange(int(steps.max()) + 1), steps) if len(steps) else steps
    if len(gaps):
        found.append(f"no rollouts of optimizer steps {listed(gaps)}, though later ones are there")
    rollout = run.config.get("rollout", {}) if run.config else {}
    wanted = rollout.get("num_generations")
    odd = rows["group_id"][trained & (rows["num_rollouts"] != wanted)]
    if wanted is not None and len(odd):
        found.append(f"{_named(odd)} trained with a number of completions other than {wanted}")
    return found + _late(run, rows, trained)


def _unstored(run: Run, rows: Block) -> list[str]:
    """Steps that the metrics know and the store does not, once an attempt has closed its books."""
    if run.store.problems:  # these files say themselves what is missing
        return []
    if not run.attempts or run.attempts[-1].outcome not in ("done", "stopped", "failed"):
        return []
    made = {int(row["step"]) for row in run.metric_rows() if "step" in row}
    lost = np.array(sorted(made - set(rows["step"].tolist())), dtype=np.int64)
    if not len(lost):
        return []
    return [f"optimizer steps {listed(lost)} were made (metrics.jsonl), but left no rollouts here"]


def _late(run: Run, rows: Block, trained: Array) -> list[str]:
    """By attempt: a resume may change the bound."""
    algorithm = run.config.get("algorithm", {}) if run.config else {}
    bounds = {a.number: a.max_staleness for a in run.attempts if a.max_staleness is not None}
    found = []
    for attempt in np.unique(rows["attempt"]):
        bound = bounds.get(int(attempt), algorithm.get("max_staleness"))
        mine = trained & (rows["attempt"] == attempt)
        if bound is not None and (mine & (rows["staleness"] > bound)).any():
            late = rows["group_id"][mine & (rows["staleness"] > bound)]
            found.append(f"{_named(late)} trained with a staleness above the bound of {bound}")
    return found


def _unexplained(run: Run, rows: Block) -> list[str]:
    reasons = np.array(run.decoded("reason", rows["reason"]), dtype=object)
    silent = (reasons == "") & (rows["status"] != TRAINED)
    ids = rows["group_id"][silent]
    return [f"{_named(ids)} dropped or abandoned without a reason"] if len(ids) else []


def _reasons(run: Run, rows: Block) -> dict[str, int]:
    lost = rows["status"] != TRAINED
    statuses = run.decoded("status", rows["status"][lost])
    reasons = run.decoded("reason", rows["reason"][lost])
    pairs = zip(statuses, reasons, strict=True)
    return dict(Counter(f"{status}: {reason}" for status, reason in pairs).most_common())


def _named(ids: Array) -> str:
    return f"group {ids[0]} was" if len(ids) == 1 else f"groups {listed(ids)} were"


def listed(numbers: Sequence[int] | Array) -> str:
    """The first few, and how many more there are."""
    shown = ", ".join(str(n) for n in numbers[:_MAX_NAMED])
    rest = len(numbers) - _MAX_NAMED
    return f"{shown} and {rest} more" if rest > 0 else shown
