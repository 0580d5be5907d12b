"""`llamarl-hpc rollouts replay RUN`: another reward over the stored completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamarl_hpc.cli.damage import print_problems
from llamarl_hpc.cli.figures import write_figures
from llamarl_hpc.cli.narrow import narrow_table

if TYPE_CHECKING:
    from rich.table import Table

    from analysis.read_run import Run
    from analysis.replay import Rescoring, StoredGroup
    from llamarl_hpc.config.schema import Config

RunArgument = Annotated[Path, typer.Argument(help="Folder of a run (or the folder above).")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write the figures here.")]
_MAX_ROWS = 12  # of the table; the figures have every step
_AHEAD = 4  # groups in the pool for each of its workers


def replay(
    run: RunArgument,
    reward: Annotated[
        list[str] | None,
        typer.Option(
            "--reward",
            help="module:function, path/to/file.py:function or math_answer; with =0.5 at its end "
            "for a weight. Several add up. Default: the run's own.",
        ),
    ] = None,
    purpose: Annotated[str, typer.Option(help="train or eval.")] = "train",
    first_step: Annotated[int, typer.Option(help="From this optimizer step.")] = 0,
    last_step: Annotated[int | None, typer.Option(help="Up to this optimizer step.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that score.")] = 1,
    json_file: JsonOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="JSON Lines: old and new reward of every rollout."),
    ] = None,
) -> None:
    """Score the stored completions again, with another reward. The run is not changed."""
    from rich.console import Console
    from rich.text import Text

    from analysis.read_run import Run
    from analysis.replay import Rescoring, stored_groups
    from analysis.tokens import visible
    from llamarl_hpc.config.load import load_config
    from llamarl_hpc.errors import ConfigError

    opened = Run.open(run)
    config = _with_rewards(load_config(opened.dir.config), reward or [], workers)
    if out is not None and out.resolve().is_relative_to(opened.dir.path):
        raise ConfigError(f"{out} is inside the run, which stays as it is; choose another --out")
    steps = (first_step, 2**62 if last_step is None else last_step)

    def work(run: Run) -> Rescoring:
        rescoring = Rescoring([spec.name or "" for spec in config.rewards])
        _score(config, stored_groups(run, purpose=purpose, steps=steps), rescoring)
        return rescoring

    rescoring = opened.without_damage(work)
    if not rescoring.columns():
        raise ConfigError(_nothing_scored(rescoring, opened, purpose))
    figures = {"run": str(opened.dir.path)} | rescoring.figures()
    console = Console()
    print_problems(console, opened)
    console.print(_table(rescoring))
    if rescoring.num_failed:
        said = (f"{rescoring.num_failed} groups could not be scored: ", "yellow")
        last = rescoring.first_error.splitlines()[-1]
        console.print(Text.assemble(said, visible(last)), soft_wrap=True)
    if json_file is not None:
        write_figures(json_file, figures)
    if out is not None:
        _write_rows(out, rescoring)


def _nothing_scored(rescoring: Rescoring, run: Run, purpose: str) -> str:
    if rescoring.num_failed:
        last = rescoring.first_error.splitlines()[-1]
        return f"none of {rescoring.num_failed} groups could be scored: {last}"
    known = run.table("groups", ["step"], run.group_mask(purpose=purpose))["step"]
    has = f"steps {known.min()} to {known.max()}" if len(known) else "nothing"
    return f"no completion of purpose {purpose} fits; {run.dir.rollouts} has {has} of it"


def _with_rewards(config: Config, rewards: Sequence[str], workers: int) -> Config:
    """The run's config with these rewards instead of its own. Raises ConfigError."""
    changes: dict[str, Any] = {
        "reward_pool": config.reward_pool.model_copy(update={"workers": workers})
    }
    if rewards:
        changes["rewards"] = _named_apart([_reward(text) for text in rewards])
    return config.model_copy(update=changes)


def _reward(text: str) -> Any:
    from llamarl_hpc.config.schema import MathAnswerReward, PythonReward
    from llamarl_hpc.errors import ConfigError

    what, equals, number = text.rpartition("=")
    what, number = (what, number) if equals else (text, "1.0")
    try:
        weight = float(number)
    except ValueError:
        raise ConfigError(f"--reward {text}: {number!r} is not a weight; write =0.5") from None
    if what == "math_answer":
        return MathAnswerReward(weight=weight)
    name = what.rpartition(":")[2]
    return PythonReward(function=what, name=name, weight=weight)


def _named_apart(rewards: list[Any]) -> list[Any]:
    """Equal names get a number: they are columns."""
    seen: dict[str, int] = {}
    found = []
    for reward in rewards:
        seen[reward.name] = count = seen.get(reward.name, 0) + 1
        name = reward.name if count == 1 else f"{reward.name}.{count}"
        found.append(reward.model_copy(update={"name": name}))
    return found


def _score(config: Config, groups: Iterator[StoredGroup], rescoring: Rescoring) -> None:
    """Through the same pool as in a run: limits of time and memory hold."""
    from llamarl_hpc.channels.messages import ScoreItem
    from llamarl_hpc.rewards.pool import RewardPool
    from llamarl_hpc.types import Purpose

    pool = RewardPool(config)
    waiting: dict[int, StoredGroup] = {}

    def collect(at_most: int) -> None:
        while len(waiting) > at_most:
            for scores in pool.collect(1.0):
                group = waiting.pop(scores.group_id)
                if scores.error:
                    rescoring.failed(scores.error)
                else:
                    rescoring.add(group, scores.total, list(scores.components.values()))

    try:
        pool.start()
        for number, group in enumerate(groups):
            waiting[number] = group
            pool.submit(
                ScoreItem(
                    purpose=Purpose.TRAIN,
                    group_id=number,
                    prompt=group.prompt,
                    columns=group.columns,
                    completions=group.completions,
                )
            )
            collect(_AHEAD * config.reward_pool.workers)
        collect(0)
    finally:
        pool.close()


def _table(rescoring: Rescoring) -> Table:
    import numpy as np

    means = ("old", "new", *rescoring.names)
    names = ("steps", "rollouts", *means, "changed", "turned", "correlation")
    table = narrow_table("reward, old and new", names)
    columns = rescoring.columns()
    first, last = int(columns["step"].min()), int(columns["step"].max())
    edges = np.unique(np.linspace(first, last + 1, _MAX_ROWS + 1).astype(int)).tolist()
    for a, b in [*pairwise(edges), (first, last + 1)]:
        mask = (columns["step"] >= a) & (columns["step"] < b)
        if not mask.any():  # evaluations are not of every step
            continue
        label = f"{a}" if b == a + 1 else f"{a}-{b - 1}"
        table.add_row("all" if (a, b) == (first, last + 1) else label, *_cells(columns, mask))
    return table


def _cells(columns: dict[str, Any], mask: Any) -> list[str]:
    from analysis.replay import compare

    row = compare(columns, mask)
    if not row["rollouts"]:
        return ["0"]
    parts = [value for name, value in row.items() if name.startswith("rewards/")]
    correlation = row["correlation"]
    return [
        str(row["rollouts"]),
        f"{row['old_mean']:.3f}",
        f"{row['new_mean']:.3f}",
        *("" if value is None else f"{value:.3f}" for value in parts),
        f"{100 * row['changed_share']:.1f} %",
        f"{100 * row['turned_share']:.1f} %",
        "" if correlation is None else f"{correlation:+.2f}",
    ]


def _write_rows(path: Path, rescoring: Rescoring) -> None:
    from llamarl_hpc.errors import ConfigError
    from llamarl_hpc.storage.atomic import write_text

    columns = rescoring.columns()
    names = [name for name in columns if name != "turned"]
    lines = [
        json.dumps({name: _number(value) for name, value in zip(names, row, strict=True)})
        for row in zip(*(columns[name].tolist() for name in names), strict=True)
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(f"{line}\n" for line in lines))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another --out") from error


def _number(value: float) -> float | None:
    return value if value == value else None  # NaN: unknown
