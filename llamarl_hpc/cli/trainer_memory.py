"""`llamarl-hpc trainer-memory CONFIG`: what a trainer rank will hold, by part; or really holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamarl_hpc.cli.figures import write_figures
from llamarl_hpc.cli.run import Overrides

if TYPE_CHECKING:
    from llamarl_hpc.training.memory import TrainerMemory
    from llamarl_hpc.training.memory_task import Peaks

_SAYS = {
    "program": "Python, torch, DeepSpeed",
    "parameters": "weights of the model",
    "gradients": "",
    "optimizer": "moments, float32 weights",
    "gathered": "weights of other ranks, while they are used",
    "activations": "kept for the backward pass",
    "logits": "of one chunk, and the head's gradient",
    "reduction": "copies and buckets when gradients are summed",
    "reference": "frozen policy of the KL term",
    "weight_sync": "this rank's part of what generators get",
    "checkpoint": "copy that is being written",
}


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("trainer-memory")(trainer_memory)


def trainer_memory(
    config: Annotated[Path, typer.Argument(help="YAML file, or the config.yaml of a run.")],
    overrides: Overrides = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Also make a few steps with made-up rollouts, and compare."),
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures to this file.")
    ] = None,
) -> None:
    """Memory of a trainer rank by part: parameters, gradients, optimizer, activations, copies."""
    from rich.console import Console

    from llamarl_hpc.config.load import load_config
    from llamarl_hpc.models.load import CONFIG, read_json, resolve_model
    from llamarl_hpc.training.memory import ModelShape, estimate

    settings = load_config(config, overrides or [])
    folder = resolve_model(settings.model.path)
    ranks = settings.resources.trainer.num_ranks
    memory = estimate(ModelShape.of(read_json(folder / CONFIG)), settings, ranks)
    peaks = None
    if measure:
        from llamarl_hpc.cli.measure_memory import measure_peaks

        peaks = measure_peaks(settings, folder, ranks)
    figures = _figures(memory, ranks, peaks)
    Console().print(_table(memory, figures))
    if json_file is not None:
        write_figures(json_file, figures)


def _figures(memory: TrainerMemory, ranks: int, peaks: list[Peaks] | None) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "ranks": ranks,
        "parts_bytes": memory.parts(),
        "step_peak_bytes": memory.step_peak,
        "checkpoint_peak_bytes": memory.step_peak + memory.checkpoint,
        "peak_bytes": memory.peak,
    }
    if peaks is not None:
        step = max(rank.step for rank in peaks)
        with_checkpoint = max(rank.with_checkpoint for rank in peaks)
        figures |= {
            "measured_program_bytes": max(rank.program for rank in peaks),
            "measured_step_peak_bytes": step,
            "measured_checkpoint_peak_bytes": with_checkpoint,
            "step_peak_vs_measured": memory.step_peak / step,
            "checkpoint_peak_vs_measured": (memory.step_peak + memory.checkpoint) / with_checkpoint,
        }
    return figures


def _table(memory: TrainerMemory, figures: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(title=f"a trainer rank (of {figures['ranks']}), MiB", title_justify="left")
    for name in ("part", "MiB", ""):
        table.add_column(name, justify="right" if name == "MiB" else "left")
    for name, num_bytes in memory.parts().items():
        if num_bytes:
            table.add_row(name, _mib(num_bytes), _SAYS[name])
    table.add_section()
    table.add_row("peak of a step", _mib(memory.step_peak), _measured(figures, "step"))
    table.add_row(
        "with a checkpoint",
        _mib(memory.step_peak + memory.checkpoint),
        _measured(figures, "checkpoint"),
    )
    table.add_row("with all of it", _mib(memory.peak))
    return table


def _measured(figures: dict[str, Any], what: str) -> str:
    key = f"measured_{what}_peak_bytes"
    if key not in figures:
        return ""
    ratio = figures[f"{what}_peak_vs_measured"]
    return f"measured {_mib(figures[key])}, the estimate is {ratio:.2f} of it"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f}"
