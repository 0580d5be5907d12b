"""`llamarl-hpc rollouts ...`: look at what the model wrote. Here: show, stats, verify."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamarl_hpc.cli import (
    rollouts_diff,
    rollouts_files,
    rollouts_replay,
    rollouts_replay_loss,
    rollouts_search,
    rollouts_watch,
)
from llamarl_hpc.cli.damage import print_problems
from llamarl_hpc.cli.figures import write_figures
from llamarl_hpc.cli.narrow import narrow_table
from llamarl_hpc.cli.rollout_filters import (
    AllOption,
    MaxRewardOption,
    MinRewardOption,
    PromptOption,
    PurposeOption,
    StatusOption,
    reward_range,
)
from llamarl_hpc.errors import LlamarlError

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from analysis.read_run import Run
    from analysis.stored_rollout import StoredRollout

RunArgument = Annotated[Path, typer.Argument(help="Folder of a run (or the folder above).")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write the figures here.")]

# Background by ratio level -3..3: below 1 amber, above 1 blue; readable on dark and on light.
_COLOURS = {
    -3: "black on #e0912f",
    -2: "black on #edb76a",
    -1: "black on #f6dcb0",
    0: "",
    1: "black on #c9def5",
    2: "black on #8bb9ec",
    3: "black on #4b8fe0",
}

_MAX_EMPTY = 10  # groups without completions that are named


def register(app: typer.Typer) -> None:
    """Add the sub-commands to the app."""
    rollouts = typer.Typer(no_args_is_help=True, help="Look at what the model wrote.")
    rollouts.command("show")(show)
    rollouts.command("stats")(stats)
    rollouts.command("verify")(verify)
    rollouts.command("watch")(rollouts_watch.watch)
    rollouts.command("grep")(rollouts_search.grep)
    rollouts.command("export")(rollouts_files.export_rollouts)
    rollouts.command("diff")(rollouts_diff.diff)
    rollouts.command("repair")(rollouts_files.repair)
    rollouts.command("replay")(rollouts_replay.replay)
    rollouts.command("replay-loss")(rollouts_replay_loss.replay_loss)
    app.add_typer(rollouts, name="rollouts")


def show(
    run: RunArgument,
    step: Annotated[int | None, typer.Option(help="Only of this optimizer step.")] = None,
    status: StatusOption = None,
    purpose: PurposeOption = None,
    group: Annotated[int | None, typer.Option(help="Only the group with this number.")] = None,
    prompt: PromptOption = None,
    min_reward: MinRewardOption = None,
    max_reward: MaxRewardOption = None,
    rollout: Annotated[list[int] | None, typer.Option(help="Only rollouts with these ids.")] = None,
    limit: Annotated[int, typer.Option(help="At most so many, the newest.")] = 10,
    all_attempts: AllOption = False,
) -> None:
    """Prompt, completion, rewards; each token coloured by how far it was off-policy."""
    from rich.console import Console

    from analysis.read_run import Run
    from analysis.tokens import load_tokenizer

    opened = Run.open(run)
    wanted: dict[str, Any] = {
        "lineage": "all" if all_attempts else "current",
        "purpose": purpose,
        "status": status,
        "steps": None if step is None else (step, step),
        "prompt": prompt,
    }

    def chosen(run: Run) -> list[StoredRollout]:
        if rollout:
            return [run.rollout_at(_find(run, number)) for number in rollout]
        mask = run.rollout_mask(**wanted, reward=reward_range(min_reward, max_reward))
        if group is not None:
            mask &= run.store.column("rollouts/group_id") == group
        rows = mask.nonzero()[0].tolist()[-limit:] if limit > 0 else []
        return [run.rollout_at(row) for row in rows]

    found = opened.without_damage(chosen)
    console = Console()
    print_problems(console, opened)
    tokenizer = load_tokenizer(opened) if found else None
    for entry in found:
        console.print(_panel(entry, tokenizer))
    if found:
        console.print(_legend(tokenizer is not None))
    else:
        console.print(opened.without_damage(lambda run: _nothing(run, wanted, group)))


def stats(run: RunArgument, json_file: JsonOption = None) -> None:
    """Counts and means by status, by staleness, and over the steps; what the run cost."""
    from rich.console import Console

    from analysis.cost import cost_sheet
    from analysis.read_run import Run
    from analysis.rollout_stats import rollout_stats
    from llamarl_hpc.cli.cost_tables import cost_tables
    from llamarl_hpc.launch.usage import usage_text

    opened = Run.open(run)
    sacct = usage_text(opened.info)
    figures, sheet = opened.without_damage(
        lambda run: (rollout_stats(run), cost_sheet(run, sacct=sacct))
    )
    console = Console()
    print_problems(console, opened)
    for table in [*_stats_tables(figures), *cost_tables(sheet)]:
        console.print(table)
    if json_file is not None:
        write_figures(json_file, figures | {"cost": sheet.to_json()})


def verify(run: RunArgument, json_file: JsonOption = None) -> None:
    """Checksums, order and accounting; exit code 1 when something is wrong."""
    from dataclasses import asdict

    from rich.console import Console
    from rich.text import Text

    from analysis.accounting import accounting, check_files
    from analysis.read_run import Run
    from analysis.tokens import visible
    from llamarl_hpc.errors import StoreError

    opened = Run.open(run)
    violations = check_files(opened)
    account = None
    try:
        account = accounting(opened)
        violations = [*account.violations, *violations]
    except StoreError as error:  # a column that it needs is among the damaged ones
        violations = [*opened.store.problems, *(violations or [str(error)])]
    if json_file is not None:
        figures = asdict(account) if account is not None else {}
        write_figures(json_file, figures | {"violations": violations})
    console = Console()
    if account is not None:
        console.print(_account_table(account, len(opened.store.file_names)))
    for violation in violations:
        console.print(Text.assemble(("wrong: ", "red"), visible(violation)), soft_wrap=True)
    if violations:
        raise typer.Exit(1)
    console.print("[green]sound:[/green] every issued group is accounted for", highlight=False)


# ---------------------------------------------------------------- one rollout


def _find(run: Run, rollout_id: int) -> int:
    try:
        return run.store.find_rollout(rollout_id)
    except KeyError as error:
        raise _user_error(str(error.args[0])) from error


def _user_error(text: str) -> LlamarlError:
    from llamarl_hpc.errors import ConfigError

    return ConfigError(f"{text}; 'llamarl-hpc rollouts show' without it lists the newest")


def _panel(rollout: StoredRollout, tokenizer: Any) -> Any:
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    from analysis.tokens import visible

    lines: list[Text] = [Text(visible(rollout.prompt.strip()), style="dim"), Text()]
    lines.append(_completion(rollout, tokenizer))
    lines.append(Text())
    lines.append(_facts(rollout))
    title = f"rollout {rollout.rollout_id}  {_where(rollout)}"
    return Panel(Group(*lines), title=Text(title), title_align="left", border_style="dim")


def _where(rollout: StoredRollout) -> str:
    if rollout.purpose == "eval":
        return f"evaluation of version {rollout.step}, question {rollout.group_id}"
    at = f"step {rollout.step}" if rollout.step >= 0 else rollout.status
    return f"{at}, group {rollout.group_id}"


def _completion(rollout: StoredRollout, tokenizer: Any) -> Text:
    from rich.text import Text

    from analysis.tokens import coloured_pieces, visible

    text = Text()
    for piece, level in coloured_pieces(tokenizer, rollout):
        text.append(visible(piece), style=_COLOURS[level])
    return text


def _facts(rollout: StoredRollout) -> Text:
    import math

    from rich.text import Text

    from analysis.tokens import visible

    parts = [f"reward {rollout.reward:.3f}"]
    parts += [f"{n} {v:.3f}" for n, v in rollout.rewards.items() if not math.isnan(v)]
    if rollout.status == "trained":
        parts.append(f"advantage {rollout.advantage:+.3f}")
        parts.append(f"staleness {rollout.staleness}")
        ratio = rollout.ratio
        parts.append(f"ratio {ratio.min():.2f}-{ratio.max():.2f}")
    parts.append(f"{len(rollout.token_ids)} tokens, {rollout.finish_reason}")
    versions = sorted({span.version for span in rollout.versions})
    parts.append(f"version {'+'.join(str(v) for v in versions)}")
    parts += [rollout.generator, f"prompt {rollout.prompt_id}"]
    if rollout.reason:
        parts.append(rollout.reason)
    answer = rollout.columns.get("answer")
    if answer is not None:
        parts.insert(0, f"answer {visible(str(answer)[:60])}")
    return Text("  ".join(parts), style="cyan")


def _legend(has_tokenizer: bool) -> Text:
    from rich.text import Text

    if not has_tokenizer:
        return Text("tokens are not coloured: the run's tokenizer.json was not found", style="dim")
    text = Text("probability under the trainer over that under the generator:  ", style="dim")
    for level, name in zip(
        (-3, -2, -1, 1, 2, 3), ("<0.5", "<0.8", "<0.95", ">1.05", ">1.25", ">2"), strict=True
    ):
        text.append(f" {name} ", style=_COLOURS[level])
    return text


def _nothing(run: Run, wanted: dict[str, Any], group: int | None) -> Text:
    """That there is none; and groups that fit, but came back without completions."""
    from rich.text import Text

    from analysis.tokens import visible

    total = run.store.num_rows("rollouts")
    lines = [f"no rollout fits; the store of {run.dir.path} has {total}"]
    mask = run.group_mask(**wanted) & (run.store.column("groups/num_rollouts") == 0)
    if group is not None:
        mask &= run.store.column("groups/group_id") == group
    rows = run.table("groups", ["group_id", "status", "reason"], mask)
    names = (run.decoded(name, rows[name][-_MAX_EMPTY:]) for name in ("status", "reason"))
    if num := len(rows["group_id"]):
        lines.append(f"groups that fit and have no completions: {num}, the newest")
    for number, *why in zip(rows["group_id"][-_MAX_EMPTY:].tolist(), *names, strict=True):
        lines.append(visible(f"  group {number}: {': '.join(why)}"))
    return Text("\n".join(lines))


# ---------------------------------------------------------------- tables


def _stats_tables(figures: dict[str, Any]) -> list[Table]:
    from rich.table import Table

    groups = Table(title="groups", title_justify="left")
    for status in figures["groups"]:
        groups.add_column(status, justify="right")
    groups.add_row(*(str(count) for count in figures["groups"].values()))
    steps, lags = figures["by_steps"], figures["by_staleness"]
    return [
        groups,
        _means_table("trained rollouts, by step", "steps", steps, _step_range),
        _means_table(
            "trained rollouts, by staleness", "staleness", lags, lambda r: str(r["staleness"])
        ),
    ]


def _step_range(row: dict[str, Any]) -> str:
    first, last = row["first_step"], row["last_step"]
    return f"{first}" if first == last else f"{first}-{last}"


def _means_table(
    title: str, first: str, rows: list[dict[str, Any]], label: Callable[[dict[str, Any]], str]
) -> Table:
    columns = (first, "rollouts", "reward", *_components(rows), "stale", "tokens", "cut off")
    table = narrow_table(title, columns)
    for row in rows:
        table.add_row(label(row), *_cells(row))
    return table


def _components(rows: list[dict[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith("rewards/"))
    return [key.removeprefix("rewards/").removesuffix("/mean") for key in keys]


def _cells(row: dict[str, Any]) -> list[str]:
    if not row["rollouts"]:
        return ["0"]
    means = [row[key] for key in row if key.startswith("rewards/")]
    return [
        str(row["rollouts"]),
        f"{row['reward_mean']:.3f}",
        *("" if mean is None else f"{mean:.3f}" for mean in means),
        f"{row['staleness_mean']:.2f}",
        f"{row['length_mean']:.1f}",
        f"{100 * row['truncated_share']:.1f} %",
    ]


def _account_table(account: Any, num_files: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    from analysis.tokens import visible

    table = Table.grid(padding=(0, 2))
    table.add_row("groups issued", str(account.num_issued))
    for status, count in account.counts.items():
        table.add_row(f"  {status}", str(count))
    for reason, count in account.reasons.items():
        table.add_row(Text(f"    {visible(reason)}"), str(count))
    if account.in_flight:
        table.add_row("  in flight", str(len(account.in_flight)))
    if account.num_superseded:
        table.add_row("rows that a resume threw away", str(account.num_superseded))
    table.add_row("rollouts", str(account.num_rollouts))
    table.add_row("files", str(num_files))
    return table
