"""`llamarl-hpc rollouts grep PATTERN RUN`: find completions and prompts by their text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamarl_hpc.cli.rollout_filters import (
    AllOption,
    MaxRewardOption,
    MinRewardOption,
    PromptOption,
    PurposeOption,
    StatusOption,
    reward_range,
)

if TYPE_CHECKING:
    from rich.text import Text

_AROUND = 60  # characters shown on each side of a match
_PLACES = ("completion", "prompt", "both")


def grep(
    pattern: Annotated[str, typer.Argument(help="Regular expression, in Python's syntax.")],
    run: Annotated[Path, typer.Argument(help="Folder of a run (or the folder above).")],
    place: Annotated[
        str, typer.Option("--in", help="Where to look: completion, prompt or both.")
    ] = "completion",
    ignore_case: Annotated[bool, typer.Option("--ignore-case", "-i")] = False,
    step: Annotated[int | None, typer.Option(help="Only of this optimizer step.")] = None,
    status: StatusOption = None,
    purpose: PurposeOption = None,
    prompt: PromptOption = None,
    min_reward: MinRewardOption = None,
    max_reward: MaxRewardOption = None,
    limit: Annotated[int, typer.Option(min=1, help="Show at most so many; all are counted.")] = 50,
    all_attempts: AllOption = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the matches here.")
    ] = None,
) -> None:
    """Rollouts whose text matches, with reward; exit code 1 when there is none."""
    from rich.console import Console

    from analysis.export import file_rows
    from analysis.read_run import Run
    from llamarl_hpc.cli.damage import print_problems

    expression = _compiled(pattern, ignore_case, place)
    opened = Run.open(run)
    console = Console()
    found: list[dict[str, Any]] = []

    def search(run: Run) -> tuple[int, int]:
        """(matches, rollouts searched); shows matches that were not shown in an earlier try."""
        searched = total = 0
        for rows in file_rows(
            run,
            lineage="all" if all_attempts else "current",
            purpose=purpose,
            status=status,
            steps=None if step is None else (step, step),
            prompt=prompt,
            reward=reward_range(min_reward, max_reward),
        ):
            searched += len(rows.rows)
            for match in _matches(rows, expression, place):
                total += 1
                if len(found) < min(total, limit):
                    found.append(match)
                    console.print(_line(match), soft_wrap=True)
        return total, searched

    total, searched = opened.without_damage(search)
    print_problems(console, opened)
    console.print(f"{total} of {searched} rollouts match", style="dim", highlight=False)
    if json_file is not None:
        from llamarl_hpc.cli.figures import write_figures

        write_figures(json_file, {"matching": total, "searched": searched, "shown": found})
    if not total:
        raise typer.Exit(1)


def _compiled(pattern: str, ignore_case: bool, place: str) -> re.Pattern[str]:
    from llamarl_hpc.errors import ConfigError

    if place not in _PLACES:
        raise ConfigError(f"--in is one of {', '.join(_PLACES)}; got {place!r}")
    try:
        return re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except re.error as error:
        raise ConfigError(
            f"{pattern!r} is not a regular expression ({error}); put a backslash before "
            "characters that stand for themselves"
        ) from error


def _matches(rows: Any, expression: re.Pattern[str], place: str) -> Any:
    """One dictionary per rollout of a file that matches, at its first match."""
    texts = {"completion": rows.texts, "prompt": rows.prompts}
    looked = {name: read() for name, read in texts.items() if place in (name, "both")}
    columns: dict[str, list[Any]] = {}
    for index in range(len(rows.rows)):
        for name, all_texts in looked.items():
            match = expression.search(all_texts[index])
            if match is None:
                continue
            if not columns:  # of a file without a match they are never read
                names = ("rollout_id", "step", "group_id", "reward")
                columns = {n: rows.column(f"rollouts/{n}").tolist() for n in names}
            reward = columns["reward"][index]
            yield {
                "rollout_id": columns["rollout_id"][index],
                "step": columns["step"][index],
                "group_id": columns["group_id"][index],
                "reward": reward if reward == reward else None,
                "in": name,
                "before": _one_line(all_texts[index][: match.start()])[-_AROUND:],
                "match": _one_line(match.group()),
                "after": _one_line(all_texts[index][match.end() :])[:_AROUND],
            }
            break


def _one_line(text: str) -> str:
    from analysis.tokens import visible

    return visible(text.replace("\n", "\\n"))


def _line(match: dict[str, Any]) -> Text:
    from rich.text import Text

    reward = "-" if match["reward"] is None else f"{match['reward']:.3f}"
    text = Text(f"{match['rollout_id']}  step {match['step']}  reward {reward}  ", style="cyan")
    text.append(match["before"], style="default")
    text.append(match["match"], style="bold red")
    text.append(match["after"], style="default")
    return text
