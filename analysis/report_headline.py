"""The headline of the report: a run in a few numbers, and words about where it stands."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from analysis.accounting import Accounting
from analysis.read_run import Evaluation, Run
from analysis.rollout_stats import zero_spread_share
from analysis.statistics import difference_interval
from analysis.timeline import Overlap


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number of the headline."""

    label: str
    value: str
    note: str = ""


def figures(
    run: Run, rows: Sequence[dict[str, Any]], evaluations: Sequence[Evaluation], account: Accounting
) -> list[Figure]:
    found = _accuracy_figures(evaluations)
    steps = [row["time/step"] for row in rows if isinstance(row.get("time/step"), int | float)]
    tokens = sum(row.get("num_completion_tokens") or 0.0 for row in rows)
    max_steps = (run.config.get("trainer") or {}).get("max_steps")
    found.append(
        Figure(
            label="optimizer steps",
            value=f"{len(rows)}",
            note=f"of {max_steps}" if max_steps else "",
        )
    )
    if steps:
        found.append(
            Figure(
                label="seconds per step",
                value=f"{statistics.median(steps):.1f}",
                note=f"median; slowest {max(steps):.1f}",
            )
        )
        if tokens:
            found.append(
                Figure(
                    label="tokens per second",
                    value=f"{tokens / sum(steps):,.0f}",
                    note="of completions, all generators",
                )
            )
    found.append(Figure(label="wall time", value=duration(_wall_s(run, rows))))
    lags = [row["staleness/mean"] for row in rows if row.get("staleness/mean") is not None]
    if lags:
        bound = (run.config.get("algorithm") or {}).get("max_staleness")
        found.append(
            Figure(
                label="staleness",
                value=f"{statistics.fmean(lags):.2f}",
                note=f"mean; bound {bound}" if bound is not None else "mean",
            )
        )
    share = zero_spread_share(run)
    even = "" if math.isnan(share) else f"{100 * share:.0f} % of groups without spread"
    found.append(Figure(label="rollouts", value=f"{account.num_rollouts:,}", note=even))
    return found


def _accuracy_figures(evaluations: Sequence[Evaluation]) -> list[Figure]:
    if not evaluations:
        return []
    first, last = evaluations[0], evaluations[-1]
    figures = [
        Figure(
            label=f"held-out accuracy, v{e.policy_version}",
            value=f"{100 * e.accuracy:.1f} %",
            note=f"{e.num_correct:g} of {e.num_prompts}; 95 %: {100 * e.interval[0]:.1f} to "
            f"{100 * e.interval[1]:.1f}",
        )
        for e in dict.fromkeys((first, last))
    ]
    if last is not first:
        low, high = difference_interval(
            (first.num_correct, first.num_prompts), (last.num_correct, last.num_prompts)
        )
        figures.append(
            Figure(
                label="gain",
                value=f"{100 * (last.accuracy - first.accuracy):+.1f} points",
                note=f"95 %: {100 * low:+.1f} to {100 * high:+.1f}",
            )
        )
    return figures


def overlap_text(o: Overlap) -> str:
    return (
        f"A step took {o.step_s:.2f} s (mean of {o.num_steps} undisturbed steps). Generation "
        f"needs {o.t_gen:.2f} s of it and training {o.t_train:.2f} s: one after the other "
        f"{o.t_gen + o.t_train:.2f} s. Overlapping makes it {o.speed_up:.2f} times as fast, of "
        f"at most {o.bound:.2f} ({100 * o.share_of_bound:.0f} %)."
    )


def state(run: Run, rows: Sequence[dict[str, Any]], now: float) -> dict[str, str]:
    attempts = run.attempts
    if not attempts:
        return {"word": "not started", "tone": "plain", "note": ""}
    last = attempts[-1]
    if last.ended is None:
        seen = max([last.started, *(float(row.get("time", 0.0)) for row in rows[-1:])])
        note = f"last sign of life {duration(max(0.0, now - seen))} before this report"
        return {"word": "going on", "tone": "plain", "note": note}
    tone = {"done": "good", "failed": "bad"}.get(last.outcome, "plain")
    return {"word": last.outcome or "ended", "tone": tone, "note": last.reason.split("\n")[0][:300]}


def subtitle(run: Run) -> list[str]:
    info, config = run.info, run.config
    algorithm = config.get("algorithm") or {}
    parts = [str((config.get("model") or {}).get("path") or "")]
    if algorithm:
        parts.append(
            f"{algorithm.get('loss_type')}, max_staleness {algorithm.get('max_staleness')}"
        )
    if info.get("host"):
        parts.append(f"on {info['host']}")
    if info.get("created"):
        parts.append(clock(info["created"]) if isinstance(info["created"], float) else "")
    if info.get("git"):
        parts.append(f"commit {str(info['git'])[:20]}")
    return [part for part in parts if part]


def attempt_row(attempt: Any) -> dict[str, str]:
    ended = attempt.ended
    return {
        "number": str(attempt.number),
        "from": "" if attempt.resumed_from_step is None else str(attempt.resumed_from_step),
        "started": clock(attempt.started) if attempt.started else "",
        "took": duration(ended - attempt.started) if ended else "",
        "outcome": attempt.outcome or "unknown",
        "reason": attempt.reason.split("\n")[0][:200],
    }


def _wall_s(run: Run, rows: Sequence[dict[str, Any]]) -> float:
    """Sum over attempts; the end of one that has none is its last step."""
    total = 0.0
    for attempt in run.attempts:
        times = [row["time"] for row in rows if row.get("attempt") == attempt.number]
        end = attempt.ended or max(times, default=attempt.started)
        total += max(0.0, end - attempt.started)
    return total


def clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours / 24:.1f} days"
