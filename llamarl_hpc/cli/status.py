"""`llamarl-hpc status RUN`: what a run is doing, from its folder alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from llamarl_hpc.cli.figures import write_figures


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("status")(status)


def status(
    run: Annotated[Path, typer.Argument(help="Folder of a run (or the folder above).")],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures to this file.")
    ] = None,
) -> None:
    """State, step, reward, staleness, time left, and where the time went."""
    from rich.console import Console
    from rich.text import Text

    from llamarl_hpc.run_dir import RunDir

    figures = read_status(RunDir.open(run))
    rows = list(_rows(figures))
    width = max(len(name) for name, _ in rows) + 2
    for name, value in rows:  # nothing is cut: paths are there to be copied
        Console().print(Text.assemble((f"{name:<{width}}", "dim"), value), soft_wrap=True)
    if json_file is not None:
        write_figures(json_file, figures)


def read_status(run: Any) -> dict[str, Any]:
    """The figures of a run folder; works while the run goes on, and years later."""
    import yaml

    from llamarl_hpc.cli.summary import evaluations_of
    from llamarl_hpc.observability.json_lines import read_json_lines

    info = run.read_info()
    attempts = info.get("attempts", [])
    last = attempts[-1] if attempts else {}
    lines = read_json_lines(run.metrics)
    steps = [line for line in lines if "step" in line]
    evaluations = evaluations_of(run, lines)
    newest: dict[str, Any] = steps[-1] if steps else {}
    max_steps = yaml.safe_load(run.config.read_text())["trainer"]["max_steps"]
    done = newest.get("step", -1) + 1
    seconds = newest.get("time/step")
    return {
        "run": str(run.path),
        "state": _state(last),
        "reason": last.get("reason", ""),
        "attempt": last.get("number", 0),
        "step": done,
        "max_steps": max_steps,
        "policy_version": newest.get("policy_version", 0),
        "reward": newest.get("reward/mean"),
        "staleness": newest.get("staleness/mean"),
        "accuracy": _accuracy(evaluations),
        "seconds_per_step": seconds,
        "eta_s": seconds * (max_steps - done) if seconds is not None else None,
        "idle": {k.removeprefix("idle_ratio/"): v for k, v in newest.items() if "idle_" in k},
        "time": {k.removeprefix("time/"): v for k, v in newest.items() if k.startswith("time/")},
    }


def _state(attempt: dict[str, Any]) -> str:
    """An attempt that says "running" although its process is gone was killed."""
    import socket

    outcome = str(attempt.get("outcome", "not started"))
    here = attempt.get("host") == socket.gethostname()
    if outcome == "running" and here and not _lives(int(attempt["pid"]), attempt["started"]):
        return "killed (resume continues it)"
    return outcome


def _lives(pid: int, started: float) -> bool:
    """Whether the process that wrote this still runs, and not a later one with its number."""
    import psutil

    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= started + 1.0
    except psutil.NoSuchProcess:
        return False


def _accuracy(evaluations: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [
        {
            "policy_version": line["policy_version"],
            "accuracy": line["eval/heldout/num_correct"] / line["eval/heldout/num_prompts"],
        }
        for line in evaluations
    ]


def _rows(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    def shown(value: object, form: str) -> str:
        return "-" if value is None else form.format(value)

    yield "run", figures["run"]
    yield "state", figures["state"]
    if figures["reason"]:
        yield "because", figures["reason"].splitlines()[0]
    yield "attempt", f"{figures['attempt']}"
    yield "step", f"{figures['step']} of {figures['max_steps']}"
    yield "reward", shown(figures["reward"], "{:.3f}")
    yield "staleness", shown(figures["staleness"], "{:.2f}")
    yield "seconds a step", shown(figures["seconds_per_step"], "{:.1f}")
    if figures["state"] == "running" and figures["eta_s"] is not None:
        yield "left", f"about {figures['eta_s'] / 60:.0f} min"
    for entry in figures["accuracy"]:
        yield f"held-out accuracy v{entry['policy_version']:.0f}", f"{entry['accuracy']:.3f}"
    for name, share in figures["idle"].items():
        yield f"{name} idle", f"{share:.0%}"
