"""One self-contained HTML file about a run: no network, no scripts, both themes, print and phone.

`write_report` collects what the other modules make of a run: the headline (`report_headline`),
charts (`report_charts`, `report_timeline`), flags (`hacking`), costs (`cost`) and rollouts to look
at (`report_cards`); and fills `report.html.jinja`. What is not there yet is left out, so a
half-written run has a report too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis import report_charts, report_headline
from analysis.accounting import accounting
from analysis.cost import cost_sheet
from analysis.cost_text import cost_lines, executor_rows
from analysis.hacking import watch
from analysis.read_run import Evaluation, Run
from analysis.report_cards import cards
from analysis.report_charts import Chart
from analysis.report_timeline import timeline_chart, wait_rows
from analysis.timeline import overlap
from llamarl_hpc.storage.atomic import write_text


def write_report(run: Run, out: Path | None = None, *, sacct: str = "") -> Path:
    """Write the report (default: `report.html` in the run folder) and return where it is."""
    path = run.dir.report if out is None else out
    write_text(path, render(run, sacct=sacct))
    return path


def render(run: Run, *, now: float | None = None, sacct: str = "") -> str:
    """The HTML text. `sacct` is what sacct says of the run's jobs, if anything."""
    now = now or time.time()
    return fill("report.html.jinja", run.without_damage(lambda run: _context(run, now, sacct)))


def fill(template: str, context: dict[str, Any]) -> str:
    """A template of this folder with its values."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(**context)


def _context(run: Run, now: float, sacct: str) -> dict[str, Any]:
    rows, evaluations = run.metric_rows(), run.evaluations()
    spans = run.spans(run.dir.last_attempt())
    account = accounting(run)
    together = overlap(run)
    watched = watch(run)
    sheet = cost_sheet(run, sacct=sacct)
    return {
        "name": run.info.get("name") or run.dir.path.parent.name,
        "run_id": run.info.get("run_id") or run.dir.path.name,
        "state": report_headline.state(run, rows, now),
        "subtitle": report_headline.subtitle(run),
        "figures": report_headline.figures(run, rows, evaluations, account),
        "charts": _charts(run, rows, evaluations),
        "watch": watched,
        "timeline": timeline_chart(spans),
        "waits": wait_rows(spans),
        "overlap": None if together is None else report_headline.overlap_text(together),
        "cost_executors": executor_rows(sheet) if sheet.wall_s else [],
        "cost_lines": cost_lines(sheet) if sheet.wall_s else [],
        "cards": cards(run, watched.flags),
        "account": account,
        "problems": account.violations,
        "attempts": [report_headline.attempt_row(a) for a in run.attempts],
        "versions": run.info.get("versions", {}),
        "written": report_headline.clock(now),
        "folder": str(run.dir.path),
    }


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
        report_charts.off_policy_chart(rows),
        report_charts.metric_chart(
            rows,
            "mismatch/kl",
            "Generator and trainer",
            "KL divergence of their distributions on the tokens of a step, nats: staleness, "
            "quantisation, and whatever else they differ by.",
            3,
        ),
    ]
    return [chart for chart in found if chart is not None]
