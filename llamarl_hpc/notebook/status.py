"""The status of a run as an object: `status.step`, `status.reward`; a table in a cell."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from llamarl_hpc.notebook.views import html_rows, html_table

GOING_ON = ("queued", "starting", "running")
_COLOURS = {"done": "#009E73", "failed": "#D55E00", "killed": "#D55E00", "running": "#0072B2"}


class Status:
    """Figures of one moment. Each key of `figures` is an attribute (`llamarl-hpc status --json`
    writes the same); what is not known is None."""

    def __init__(self, figures: dict[str, Any]) -> None:
        self.figures = figures

    @property
    def has_ended(self) -> bool:
        """Nothing goes on, and nothing waits in a queue."""
        return self.figures["state"] not in GOING_ON

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["figures"][name]
        except KeyError:
            raise AttributeError(
                f"a status has no '{name}'; it has {', '.join(self.__dict__.get('figures', {}))}"
            ) from None

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.figures]

    def __repr__(self) -> str:
        width = max(len(name) for name, _ in rows(self.figures)) + 2
        lines = [f"{name:<{width}}{value}" for name, value in rows(self.figures)]
        lines += [f"  {'  '.join(part)}".rstrip() for part in components(self.figures)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        named = dict(rows(self.figures))
        shown = {name: escape(value) for name, value in named.items()}
        colour = _COLOURS.get(self.figures["state"], "inherit")
        shown["state"] = f'<b style="color:{colour}">{shown["state"]}</b>'
        done, total = self.figures["step"], self.figures["max_steps"]
        shown["steps"] += f' &nbsp;<progress value="{done}" max="{max(total, 1)}"></progress>'
        table = html_rows(shown.items())
        if parts := components(self.figures):
            table += html_table(("component", "state", "nodes", "waits for"), parts)
        return table


def rows(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values as text, the important ones first."""
    yield "run", figures["run"]
    yield "state", figures["state"]
    if figures["reason"]:
        yield "because", figures["reason"].splitlines()[0]
    if figures.get("now"):
        yield "now", figures["now"]
    if figures.get("job"):
        yield "job", figures["job"]["job_id"]
    if figures["attempt"] > 1:
        yield "attempt", f"{figures['attempt']}"
    yield "steps", f"{figures['step']} of {figures['max_steps']}"
    if figures["reward"] is not None:
        yield "reward", f"{figures['reward']:.3f}"
    if figures["staleness"] is not None:
        yield "staleness", f"{figures['staleness']:.2f}"
    if figures["accuracy"]:
        yield "held-out accuracy", _accuracy(figures["accuracy"])
    if figures["seconds_per_step"] is not None:
        yield "seconds a step", f"{figures['seconds_per_step']:.1f}"
    if figures["state"] == "running" and figures["eta_s"] is not None:
        yield "left", f"about {max(1, round(figures['eta_s'] / 60))} min"
    if figures["idle"]:
        idle = figures["idle"].items()
        yield "idle", ", ".join(f"{name} {share:.0%}" for name, share in idle)
    for warning in figures.get("warnings", []):
        yield "warning", warning


def components(figures: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Name, state, nodes and why it waits, of each component of the job; empty without one."""
    return [
        (part["name"], part["state"], part["nodes"], part.get("because") or part["reason"])
        for part in (figures.get("job") or {}).get("components", [])
    ]


def _accuracy(entries: list[dict[str, float]]) -> str:
    first, last = entries[0], entries[-1]
    text = f"{last['accuracy']:.3f} (version {last['policy_version']:.0f})"
    return text if first is last else f"{first['accuracy']:.3f} at first, {text}"
