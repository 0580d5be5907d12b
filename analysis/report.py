"""One self-contained HTML file about a run: no network, no scripts, both themes, print and phone.

`write_report` collects figures (here), charts (`report_charts.py`) and rollouts to look at, and
fills `report.html.jinja`. What is not there yet is left out, so a half-written run has a report
too.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from analysis import report_charts
from analysis.accounting import Accounting, accounting
from analysis.read_run import Evaluation, Run, StoredRollout
from analysis.report_charts import Chart
from analysis.rollout_stats import zero_spread_share
from analysis.statistics import difference_interval
from analysis.timeline import Overlap, idle_shares, overlap
from analysis.tokens import coloured_pieces, load_tokenizer
from llamarl_hpc.storage.atomic import write_text
from llamarl_hpc.types import Array

_MAX_TEXT = 1500  # characters of a prompt or completion


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number of the headline."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One rollout to look at."""

    heading: str
    question: str
    pieces: list[tuple[str, int]]  # text, ratio level -3..3
    facts: list[str]
    tone: str  # good, bad or plain


def write_report(run: Run, out: Path | None = None) -> Path:
    """Write the report (default: `report.html` in the run folder) and return where it is."""
    path = run.dir.report if out is None else out
    write_text(path, render(run))
    return path


def render(run: Run, *, now: float | None = None) -> str:
    """The HTML text."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    template = environment.get_template("report.html.jinja")
    return template.render(**_context(run, now or time.time()))


def _context(run: Run, now: float) -> dict[str, Any]:
    rows, evaluations = run.metric_rows(), run.evaluations()
    spans = run.spans(run.dir.last_attempt())
    account = accounting(run)
    together = overlap(run)
    timeline = report_charts.timeline_chart(spans, idle_shares(spans))
    return {
        "name": run.info.get("name") or run.dir.path.parent.name,
        "run_id": run.info.get("run_id") or run.dir.path.name,
        "state": _state(run, rows, now),
        "subtitle": _subtitle(run),
        "figures": _figures(run, rows, evaluations, account),
        "charts": _charts(run, rows, evaluations),
        "timeline": timeline,
        "overlap": None if together is None else _overlap_text(together),
        "cards": _cards(run),
        "account": account,
        "problems": account.violations,
        "attempts": [_attempt(a) for a in run.attempts],
        "versions": run.info.get("versions", {}),
        "written": _clock(now),
        "folder": str(run.dir.path),
    }


# ---------------------------------------------------------------- headline


def _figures(
    run: Run, rows: Sequence[dict[str, Any]], evaluations: Sequence[Evaluation], account: Accounting
) -> list[Figure]:
    figures = _accuracy_figures(evaluations)
    steps = [row["time/step"] for row in rows if isinstance(row.get("time/step"), int | float)]
    tokens = sum(row.get("num_completion_tokens") or 0.0 for row in rows)
    max_steps = (run.config.get("trainer") or {}).get("max_steps")
    figures.append(
        Figure(
            label="optimizer steps",
            value=f"{len(rows)}",
            note=f"of {max_steps}" if max_steps else "",
        )
    )
    if steps:
        figures.append(
            Figure(
                label="seconds per step",
                value=f"{statistics.median(steps):.1f}",
                note=f"median; slowest {max(steps):.1f}",
            )
        )
        if tokens:
            figures.append(
                Figure(
                    label="tokens per second",
                    value=f"{tokens / sum(steps):,.0f}",
                    note="of completions, all generators",
                )
            )
    figures.append(Figure(label="wall time", value=_duration(_wall_s(run, rows))))
    lags = [row["staleness/mean"] for row in rows if row.get("staleness/mean") is not None]
    if lags:
        bound = (run.config.get("algorithm") or {}).get("max_staleness")
        figures.append(
            Figure(
                label="staleness",
                value=f"{statistics.fmean(lags):.2f}",
                note=f"mean; bound {bound}" if bound is not None else "mean",
            )
        )
    share = zero_spread_share(run)
    even = "" if math.isnan(share) else f"{100 * share:.0f} % of groups without spread"
    figures.append(Figure(label="rollouts", value=f"{account.num_rollouts:,}", note=even))
    return figures


def _accuracy_figures(evaluations: Sequence[Evaluation]) -> list[Figure]:
    if not evaluations:
        return []
    first, last = evaluations[0], evaluations[-1]
    figures = [
        Figure(
            label=f"held-out accuracy, version {e.policy_version}",
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


def _charts(
    run: Run, rows: Sequence[dict[str, Any]], evaluations: Sequence[Evaluation]
) -> list[Chart]:
    found = [
        report_charts.accuracy_chart(evaluations) if evaluations else None,
        report_charts.reward_chart(rows, run.reward_names),
        report_charts.staleness_chart(run),
        report_charts.length_chart(rows),
        report_charts.metric_chart(rows, "loss", "Loss", "Per token, over the global batch.", 2),
        report_charts.metric_chart(
            rows, "grad_norm", "Gradient norm", "Before clipping, over all ranks.", 4
        ),
        report_charts.metric_chart(
            rows, "entropy", "Entropy", "Of the policy where tokens were sampled, nats.", 5
        ),
        report_charts.ratio_chart(run),
    ]
    return [chart for chart in found if chart is not None]


def _overlap_text(o: Overlap) -> str:
    return (
        f"A step took {o.step_s:.2f} s (mean of {o.num_steps} undisturbed steps). Generation "
        f"needs {o.t_gen:.2f} s of it and training {o.t_train:.2f} s: one after the other "
        f"{o.t_gen + o.t_train:.2f} s. Overlapping makes it {o.speed_up:.2f} times as fast, of "
        f"at most {o.bound:.2f} ({100 * o.share_of_bound:.0f} %)."
    )


def _state(run: Run, rows: Sequence[dict[str, Any]], now: float) -> dict[str, str]:
    attempts = run.attempts
    if not attempts:
        return {"word": "not started", "tone": "plain", "note": ""}
    last = attempts[-1]
    if last.ended is None:
        seen = max([last.started, *(float(row.get("time", 0.0)) for row in rows[-1:])])
        note = f"last sign of life {_duration(max(0.0, now - seen))} before this report"
        return {"word": "going on", "tone": "plain", "note": note}
    tone = {"done": "good", "failed": "bad"}.get(last.outcome, "plain")
    return {"word": last.outcome or "ended", "tone": tone, "note": last.reason.split("\n")[0][:300]}


def _subtitle(run: Run) -> list[str]:
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
        parts.append(_clock(info["created"]) if isinstance(info["created"], float) else "")
    if info.get("git"):
        parts.append(f"commit {str(info['git'])[:20]}")
    return [part for part in parts if part]


def _attempt(attempt: Any) -> dict[str, str]:
    ended = attempt.ended
    return {
        "number": str(attempt.number),
        "from": "" if attempt.resumed_from_step is None else str(attempt.resumed_from_step),
        "started": _clock(attempt.started) if attempt.started else "",
        "took": _duration(ended - attempt.started) if ended else "",
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


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours / 24:.1f} days"


# ---------------------------------------------------------------- rollouts to look at


def _cards(run: Run) -> list[Card]:
    tokenizer = load_tokenizer(run)
    cards = []
    for heading, row in _chosen(run):
        rollout = run.rollout_at(row)
        question = rollout.columns.get("question")
        prompt = question if isinstance(question, str) else rollout.prompt.strip()
        pieces = coloured_pieces(tokenizer, rollout)
        cards.append(
            Card(
                heading=heading,
                question=prompt[:_MAX_TEXT],
                pieces=_cut(pieces, _MAX_TEXT),
                facts=_facts(rollout),
                tone="good" if rollout.reward > 0.5 else "bad",
            )
        )
    return cards


def _chosen(run: Run) -> list[tuple[str, int]]:
    """(why it is shown, row): a dozen, from different groups."""
    current = run.group_mask()
    of_group = run.store.column("rollouts/group")
    columns = run.store.columns("rollouts", ["step", "reward", "advantage", "purpose", "status"])
    rows = np.flatnonzero(current[of_group])
    trained = rows[columns["status"][rows] == 0]
    chosen: list[tuple[str, int]] = []
    if len(trained):
        steps = columns["step"][trained]
        late = trained[steps >= np.quantile(steps, 0.75)]
        advantage = columns["advantage"][late]
        best = _distinct(late[np.argsort(-advantage, kind="stable")], of_group, 3)
        worst = _distinct(late[np.argsort(advantage, kind="stable")], of_group, 3)
        chosen += [("best of its group", row) for row in best]
        chosen += [("worst of its group", row) for row in worst]
    tested = rows[columns["purpose"][rows] == 1]
    if len(tested):
        versions = columns["step"][tested]
        graded = "math_answer" in run.reward_names
        scores = run.store.column("rewards/math_answer") if graded else columns["reward"]
        for version, name in ((versions.max(), "last"), (versions.min(), "first")):
            at = tested[versions == version]
            right = scores[at] > 0.5
            for mask, word, count in ((right, "right", 2), (~right, "wrong", 1)):
                heading = f"{name} evaluation, {word}"
                chosen += [(heading, row) for row in _distinct(at[mask], of_group, count)]
            if versions.max() == versions.min():
                break
    return chosen


def _distinct(rows: Array, groups: Array, count: int) -> list[int]:
    found: dict[int, int] = {}
    for row in rows.tolist():
        found.setdefault(int(groups[row]), row)
        if len(found) == count:
            break
    return list(found.values())


def _facts(rollout: StoredRollout) -> list[str]:
    facts = [f"reward {rollout.reward:.2f}"]
    if rollout.status == "trained":
        facts += [f"advantage {rollout.advantage:+.2f}", f"staleness {rollout.staleness}"]
    answer = rollout.columns.get("answer")
    if isinstance(answer, str | int | float):
        facts.append(f"answer {str(answer).rpartition('####')[2].strip()[:40]}")
    at = "version" if rollout.purpose == "eval" else "step"
    facts.append(f"{at} {rollout.step}")
    facts.append(f"{len(rollout.token_ids)} tokens, {rollout.finish_reason}")
    return facts


def _cut(pieces: list[tuple[str, int]], limit: int) -> list[tuple[str, int]]:
    kept: list[tuple[str, int]] = []
    length = 0
    for text, level in pieces:
        if length + len(text) > limit:
            return [*kept, (" ...", 0)]
        kept.append((text, level))
        length += len(text)
    return kept
