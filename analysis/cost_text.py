"""A cost sheet in words and numbers, for the terminal and the report: (what, value) in order."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.cost import CostSheet


def cost_lines(sheet: CostSheet) -> list[tuple[str, str]]:
    """All but the executors, which are a table of their own."""
    return [*_hours(sheet), *_waits(sheet), *_losses(sheet), *_rates(sheet)]


def executor_rows(sheet: CostSheet) -> list[tuple[str, str, str, str]]:
    """(executor, devices, device-hours, idle share)."""
    return [
        (
            cost.executor,
            f"{cost.devices} {cost.unit}{'s' if cost.devices > 1 else ''}",
            hours(cost.hours),
            "" if cost.idle_share is None else f"{100 * cost.idle_share:.0f} %",
        )
        for cost in sheet.executors
    ]


def hours(value: float) -> str:
    """Three figures, whatever the size."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def duration(value_s: float) -> str:
    """Seconds as people say them."""
    if value_s < 100:
        return f"{value_s:.1f} s"
    if value_s < 6000:
        return f"{value_s / 60:.0f} min"
    return f"{value_s / 3600:.1f} h"


def _hours(sheet: CostSheet) -> Iterator[tuple[str, str]]:
    for unit, total in sheet.totals.items():
        share = sheet.idle_hours[unit] / total if total else 0.0
        yield f"{unit}-hours", f"{hours(total)}, {100 * share:.0f} % idle"
    if sheet.billed is not None:
        parts = [f"{hours(sheet.billed.core_hours)} core-hours"]
        if sheet.billed.gpu_hours:
            parts.insert(0, f"{hours(sheet.billed.gpu_hours)} GPU-hours")
        yield "billed by Slurm", ", ".join(parts)


def _waits(sheet: CostSheet) -> Iterator[tuple[str, str]]:
    several = f" in {sheet.attempts} attempts" if sheet.attempts > 1 else ""
    yield "wall time", f"{duration(sheet.wall_s)}{several}"
    if sheet.queue_wait_s is not None:
        yield "in the queue", duration(sheet.queue_wait_s)
    yield "from start to first training", duration(sheet.lost.start_s)
    if sheet.attempts > 1:
        yield "between attempts", duration(sheet.lost.between_s)


def _losses(sheet: CostSheet) -> Iterator[tuple[str, str]]:
    lost = sheet.lost
    if lost.steps:
        yield "steps done again", f"{lost.steps}, {duration(lost.step_s)}"
    if lost.groups_abandoned or lost.groups_dropped:
        yield "groups not used", f"{lost.groups_abandoned} abandoned, {lost.groups_dropped} dropped"
    if lost.rollouts:
        yield "generated and not counted", f"{lost.tokens:,} tokens in {lost.rollouts:,} rollouts"


def _rates(sheet: CostSheet) -> Iterator[tuple[str, str]]:
    for unit, rate in sheet.per_1000_rollouts.items():
        yield f"{unit}-hours per 1000 rollouts", hours(rate)
    for unit, rate in sheet.per_accuracy_point.items():
        yield f"{unit}-hours per point of accuracy", hours(rate)
    if sheet.accuracy_gain is not None and not sheet.per_accuracy_point:
        gain = 100 * sheet.accuracy_gain
        yield "per point of accuracy", f"not known: {gain:+.1f} points are within noise"
