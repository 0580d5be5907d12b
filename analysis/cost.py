"""What a run cost: device-hours by executor, how much of them was idle, waited for, or lost.

Devices are GPUs where the executor asks for some, else cores. An executor holds its devices from
the start of an attempt to its end, whatever it does. Read from the run folder; where sacct's text
is given, what Slurm billed stands beside it, and the queue wait is Slurm's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from analysis.lineage import Attempt
from analysis.read_run import Run
from analysis.statistics import difference_interval
from analysis.timeline import busy, seconds, within
from llamarl_hpc.observability.trace import Span
from llamarl_hpc.slurm_text.job_usage import JobUsage, parse_usage

GPU, CORE = "GPU", "core"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorCost:
    """One executor over all attempts."""

    executor: str
    devices: int
    unit: str  # of its devices: "GPU" or "core"
    hours: float  # device-hours held
    idle_share: float | None  # of those; None where it left no trace

    @property
    def idle_hours(self) -> float:
        return self.hours * (self.idle_share or 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class LostWork:
    """What was computed and does not count, or waited for."""

    steps: int  # optimizer steps that a later attempt did again
    step_s: float  # they had taken
    rollouts: int  # of those steps, and of groups dropped or abandoned
    tokens: int
    groups_abandoned: int
    groups_dropped: int
    start_s: float  # from the starts of attempts to their first training
    between_s: float  # from the ends of attempts to the next starts


@dataclass(frozen=True, kw_only=True, slots=True)
class Billed:
    """What sacct says of the run's jobs."""

    jobs: int
    wait_s: float
    gpu_hours: float
    core_hours: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CostSheet:
    """All of it. `totals` and the rates are by unit."""

    wall_s: float  # sum over attempts
    attempts: int
    executors: list[ExecutorCost]
    totals: dict[str, float]  # device-hours
    idle_hours: dict[str, float]
    queue_wait_s: float | None  # None: it was never in a queue, as far as is known
    lost: LostWork
    trained_rollouts: int
    per_1000_rollouts: dict[str, float] = field(default_factory=dict)
    accuracy_gain: float | None = None  # last minus first evaluation; None: not measured
    per_accuracy_point: dict[str, float] = field(default_factory=dict)  # only of a sure gain
    billed: Billed | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def cost_sheet(run: Run, *, sacct: str = "") -> CostSheet:
    """`sacct` is what `launch.usage` got from it; empty without Slurm."""
    usage = parse_usage(sacct)
    spans = {a.number: run.spans(a.number) for a in run.attempts}
    walls = {a.number: (a.started, _end(run, a, spans[a.number])) for a in run.attempts}
    executors = [
        _executor(name, devices, unit, walls, spans) for name, devices, unit in held_devices(run)
    ]
    trained = run.group_mask(purpose="train", status="trained")
    rollouts = int(run.table("groups", ["num_rollouts"], trained)["num_rollouts"].sum())
    totals = _by_unit(executors, "hours")
    gain, is_sure = _gain(run)
    points = 100 * gain if gain is not None and is_sure else math.nan
    return CostSheet(
        wall_s=sum(end - start for start, end in walls.values()),
        attempts=len(walls),
        executors=executors,
        totals=totals,
        idle_hours=_by_unit(executors, "idle_hours"),
        queue_wait_s=_queue_wait(run, usage),
        lost=_lost(run, walls, spans),
        trained_rollouts=rollouts,
        per_1000_rollouts={u: 1000 * h / rollouts for u, h in totals.items() if rollouts},
        accuracy_gain=gain,
        per_accuracy_point={u: h / points for u, h in totals.items() if points > 0},
        billed=_billed(usage),
    )


# ---------------------------------------------------------------- devices and hours


def held_devices(run: Run) -> list[tuple[str, int, str]]:
    """(executor, devices, unit) of every executor, as the run's config asks for them."""
    config = run.config
    resources = config.get("resources") or {}
    replicas = int((config.get("generator") or {}).get("replicas") or 1)
    roles = [("trainer", "trainer"), *((f"generator.{k}", "generator") for k in range(replicas))]
    roles.append(("reward", "reward"))
    reference = (config.get("reference") or {}).get("placement") == "executor"
    if reference and (config.get("algorithm") or {}).get("beta"):
        roles.append(("reference", "reference"))
    return [(name, *_devices(resources.get(role) or {})) for name, role in roles]


def _devices(block: dict[str, Any]) -> tuple[int, str]:
    nodes, gpus = int(block.get("nodes") or 1), int(block.get("gpus_per_node") or 0)
    if gpus:
        return nodes * gpus, GPU
    ranks = nodes * int(block.get("ntasks_per_node") or 1)
    return ranks * int(block.get("cpus_per_task") or 1), CORE


def _end(run: Run, attempt: Attempt, spans: Sequence[Span]) -> float:
    """Of an attempt that has no end (it goes on, or was killed): its last sign of life."""
    if attempt.ended is not None:
        return max(attempt.ended, attempt.started)
    lines = [
        float(row.get("time", 0.0)) for row in run.lines if row.get("attempt") == attempt.number
    ]
    return max([attempt.started, *lines, *(span.end for span in spans)])


def _executor(
    name: str,
    devices: int,
    unit: str,
    walls: dict[int, tuple[float, float]],
    spans: dict[int, list[Span]],
) -> ExecutorCost:
    held = sum(end - start for start, end in walls.values())
    traced = worked = 0.0
    for number, (start, end) in walls.items():
        if any(span.executor == name for span in spans[number]):
            traced += end - start
            worked += seconds(within(busy(spans[number], name), start, end))
    return ExecutorCost(
        executor=name,
        devices=devices,
        unit=unit,
        hours=devices * held / 3600,
        idle_share=1.0 - worked / traced if traced else None,
    )


def _by_unit(executors: Sequence[ExecutorCost], name: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for executor in executors:
        found[executor.unit] = found.get(executor.unit, 0.0) + getattr(executor, name)
    return found


def _gain(run: Run) -> tuple[float | None, bool]:
    """Held-out accuracy, last minus first, and whether that is more than noise."""
    evaluations = run.evaluations()
    if len(evaluations) < 2:
        return None, False
    first, last = evaluations[0], evaluations[-1]
    low, _ = difference_interval(
        (first.num_correct, first.num_prompts), (last.num_correct, last.num_prompts)
    )
    return last.accuracy - first.accuracy, low > 0.0


# ---------------------------------------------------------------- waits and losses


def _queue_wait(run: Run, usage: Sequence[JobUsage]) -> float | None:
    """Slurm's word, else from the submission of each job to the first attempt that it made."""
    if usage:  # the components of a job wait together
        return sum(
            max((u.wait_s or 0.0) for u in usage if u.job == job)
            for job in dict.fromkeys(u.job for u in usage)
        )
    submitted = {str(j.get("id")): j.get("submitted") for j in run.info.get("jobs", [])}
    first: dict[str, float] = {}
    for entry in run.info.get("attempts", []):
        if entry.get("job_id"):
            first.setdefault(str(entry["job_id"]), float(entry.get("started") or 0.0))
    waits = [started - submitted[job] for job, started in first.items() if submitted.get(job)]
    return sum(max(0.0, wait) for wait in waits) if waits else None


def _billed(usage: Sequence[JobUsage]) -> Billed | None:
    if not usage:
        return None
    return Billed(
        jobs=len({u.job for u in usage}),
        wait_s=sum(u.wait_s or 0.0 for u in usage if not u.component),
        gpu_hours=sum(u.gpus * u.elapsed_s for u in usage) / 3600,
        core_hours=sum(u.cpus * u.elapsed_s for u in usage) / 3600,
    )


def _lost(
    run: Run, walls: dict[int, tuple[float, float]], spans: dict[int, list[Span]]
) -> LostWork:
    kept = {(row["step"], row.get("attempt")) for row in run.metric_rows()}
    again = [
        row for row in run.lines if "step" in row and (row["step"], row.get("attempt")) not in kept
    ]
    everything = run.group_mask(lineage="all", purpose="train")
    current = run.group_mask(purpose="train")
    counted = run.group_mask(purpose="train", status="trained")
    wasted = everything & ~counted
    rows = run.table("rollouts", ["completion_length"], wasted)["completion_length"]
    starts = [
        min((s.start for s in spans[n] if s.name == "train"), default=end) - start
        for n, (start, end) in walls.items()
    ]
    ordered = [walls[number] for number in sorted(walls)]
    gaps = [b[0] - a[1] for a, b in pairwise(ordered)]
    abandoned = run.group_mask(purpose="train", status="abandoned")
    dropped = run.group_mask(purpose="train", status="dropped")
    return LostWork(
        steps=len(again),
        step_s=float(sum(row.get("time/step") or 0.0 for row in again)),
        rollouts=len(rows),
        tokens=int(np.sum(rows, dtype=np.int64)),
        groups_abandoned=int((abandoned & current).sum()),
        groups_dropped=int((dropped & current).sum()),
        start_s=sum(max(0.0, value) for value in starts),
        between_s=sum(max(0.0, gap) for gap in gaps),
    )
