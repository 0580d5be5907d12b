"""`llamarl-hpc status RUN`: what a run is doing, from its folder alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


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

    from llamarl_hpc.run_dir import RunDir

    figures = read_status(RunDir.open(run))
    Console().print(_table(figures))
    if json_file is not None:
        from llamarl_hpc.storage.atomic import write_json

        write_json(json_file, figures)


def read_status(run: Any) -> dict[str, Any]:
    """The figures of a run folder; works while the run goes on, and years later."""
    import yaml

    from llamarl_hpc.cli.summary import read_lines

    info = run.read_info()
    attempts = info.get("attempts", [])
    last = attempts[-1] if attempts else {}
    lines = read_lines(run)
    steps = [line for line in lines if "step" in line]
    evaluations = [line for line in lines if line.get("event") == "eval"]
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
    import os
    import socket

    outcome = str(attempt.get("outcome", "not started"))
    if outcome == "running" and attempt.get("host") == socket.gethostname():
        try:
            os.kill(int(attempt["pid"]), 0)
        except ProcessLookupError:
            return "killed (resume continues it)"
        except PermissionError:
            return outcome
    return outcome


def _accuracy(evaluations: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [
        {
            "policy_version": line["policy_version"],
            "accuracy": line["eval/heldout/num_correct"] / line["eval/heldout/num_prompts"],
        }
        for line in evaluations
    ]


def _table(figures: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))

    def row(name: str, value: object, form: str = "{}") -> None:
        table.add_row(f"[dim]{name}[/]", "-" if value is None else form.format(value))

    row("run", figures["run"])
    row("state", figures["state"])
    if figures["reason"]:
        row("because", figures["reason"])
    row("attempt", figures["attempt"])
    row("step", f"{figures['step']} of {figures['max_steps']}")
    row("reward", figures["reward"], "{:.3f}")
    row("staleness", figures["staleness"], "{:.2f}")
    row("seconds a step", figures["seconds_per_step"], "{:.1f}")
    if figures["state"] == "running" and figures["eta_s"] is not None:
        row("left", figures["eta_s"] / 60, "about {:.0f} min")
    for entry in figures["accuracy"]:
        row(f"held-out accuracy v{entry['policy_version']:.0f}", entry["accuracy"], "{:.3f}")
    for name, share in figures["idle"].items():
        row(f"{name} idle", share, "{:.0%}")
    return table
