"""`llamarl-hpc status RUN`: what a run is doing, from its folder and the queue."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from llamarl_hpc.cli.figures import write_figures

RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="Folder of a run, a folder above it, or a job id.")
]
_LATE_S = 120.0  # after which a silent controller is worth a word


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("status")(status)


def status(
    run: RunArgument,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures to this file.")
    ] = None,
    watch: Annotated[
        float | None,
        typer.Option("--watch", min=1.0, help="Show it again every so many seconds; Ctrl-C ends."),
    ] = None,
) -> None:
    """State, queue, step, reward, staleness, time left, and where the time went."""
    from rich.console import Console

    from llamarl_hpc.manage.find import find_run
    from llamarl_hpc.manage.status import read_status

    folder = find_run(run)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            figures = read_status(folder)
            if watch is not None:
                Console().clear()
            _show(figures)
            if json_file is not None:
                write_figures(json_file, figures)
            if watch is None:
                return
            time.sleep(watch)


def _show(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    rows = list(_rows(figures))
    width = max(len(name) for name, _ in rows) + 2
    for name, value in rows:  # nothing is cut: paths are there to be copied
        Console().print(Text.assemble((f"{name:<{width}}", "dim"), value), soft_wrap=True)
    for warning in figures["warnings"]:
        typer.echo(f"warning: {warning}", err=True)


def _rows(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "run", figures["run"]
    yield "state", figures["state"]
    if figures["reason"]:
        yield "because", figures["reason"].splitlines()[0]
    if figures["not_continued"] and figures["state"] in ("stopped", "failed", "killed"):
        yield "not continued", figures["not_continued"]
    if figures["stop_requested"] and figures["state"] in ("queued", "starting", "running"):
        yield "cancelled", "it ends after the step that is under way, and is not continued"
    if figures["now"]:
        yield "now", figures["now"]
    sign_s = figures["last_sign_s"]
    if sign_s is not None and sign_s > _LATE_S:
        yield "last sign", f"{_duration(sign_s)} ago, from {figures['host'] or 'nowhere'}"
    yield "attempt", f"{figures['attempt']}"
    yield from _rows_of_job(figures["job"])
    yield from _rows_of_steps(figures)
    for entry in figures["accuracy"]:
        yield f"held-out accuracy v{entry['policy_version']:.0f}", f"{entry['accuracy']:.3f}"
    if figures["where_time_went"]:
        shares = figures["where_time_went"].items()
        yield "trainer's time", ", ".join(f"{name} {share:.0%}" for name, share in shares)
    for name, share in figures["idle"].items():
        yield f"{name} idle", f"{share:.0%}"


def _rows_of_job(job: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    if job is None:
        return
    where = f" on {job['cluster']}" if job["cluster"] else ""
    yield "job", f"{job['job_id']}{where}  {job['state'] or 'not known to Slurm'}"
    for part in job["components"]:
        why = f"{part['reason']}: {part['because']}" if part["because"] else part["reason"]
        words = [part["state"], part["nodes"], f"({why})" if why else ""]
        yield f"  {part['name']}", "  ".join(word for word in words if word)
    if job["expected_start"] is not None:
        yield "  expected start", _moment(job["expected_start"])


def _rows_of_steps(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    def shown(value: object, form: str) -> str:
        return "-" if value is None else form.format(value)

    yield "steps", f"{figures['step']} of {figures['max_steps']}"
    if figures["rollouts"]:
        count, tokens = figures["rollouts"], figures["completion_tokens"]
        yield "rollouts trained", f"{count:,}, {tokens:,} completion tokens"
    yield "reward", shown(figures["reward"], "{:.3f}")
    yield "staleness", shown(figures["staleness"], "{:.2f}")
    yield "seconds a step", shown(figures["seconds_per_step"], "{:.1f}")
    if figures["state"] == "running" and figures["eta_s"] is not None:
        fits = {None: "", True: ", within the time limit", False: ", not within the time limit"}
        yield "left", f"about {_duration(figures['eta_s'])}{fits[figures['fits']]}"
    if figures["state"] == "running" and (stop_s := figures["time"].get("stop")) is not None:
        signal_s = figures["signal_delay_s"]
        signal = (
            "" if signal_s is None else f"; Slurm signals {signal_s:.0f} s before the job's end"
        )
        yield "a stop takes", f"about {_duration(stop_s)}{signal}"
    end = (figures["job"] or {}).get("end")
    if figures["state"] == "running" and end is not None:
        yield "time limit", f"in {_duration(max(0.0, end - time.time()))}"


def _duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3.5 h`, `2.1 days`."""
    for unit, size in (("s", 1.0), ("min", 60.0), ("h", 3600.0)):
        if seconds < 100 * size or (unit == "h" and seconds < 48 * size):
            return f"{seconds / size:.0f} {unit}" if unit != "h" else f"{seconds / size:.1f} {unit}"
    return f"{seconds / 86_400:.1f} days"


def _moment(seconds: float) -> str:
    return time.strftime("%a %d %b %H:%M", time.localtime(seconds))
