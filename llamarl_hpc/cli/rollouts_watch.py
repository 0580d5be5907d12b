"""`llamarl-hpc rollouts watch RUN`: signs that the reward is gamed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from analysis.hacking import Flag, Watch


def watch(
    run: Annotated[Path, typer.Argument(help="Folder of a run (or the folder above).")],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures here.")
    ] = None,
) -> None:
    """Does the reward rise for the right reasons? Exit code 1 when something is flagged."""
    from rich.console import Console

    from analysis import hacking
    from analysis.read_run import Run
    from llamarl_hpc.cli.damage import print_problems
    from llamarl_hpc.cli.figures import write_figures

    opened = Run.open(run)
    found = opened.without_damage(hacking.watch)
    console = Console()
    print_problems(console, opened)
    for note in found.notes:
        console.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)
    if found.figures:
        console.print(_figures(found))
    if found.phrases:
        console.print(_phrases(found))
    for flag in found.flags:
        _print_flag(console, flag)
    if json_file is not None:
        write_figures(json_file, {"run": str(opened.dir.path)} | found.to_json())
    if found.flags:
        raise typer.Exit(1)
    console.print("[green]nothing is flagged[/green]", highlight=False)


def _figures(found: Watch) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="first and last quarter of the run", title_justify="left")
    for name in ("", "first", "last"):
        table.add_column(name, justify="right" if name else "left")
    for name, (early, late) in found.figures.items():
        table.add_row(Text(name.replace("_", " ")), f"{early:.4g}", f"{late:.4g}")
    return table


def _phrases(found: Watch) -> Table:
    from rich.table import Table
    from rich.text import Text

    from analysis.tokens import visible

    table = Table(title="phrases that pay, <n> is any number", title_justify="left")
    for name in ("phrase", "well-paid", "others", "at first", "z", "for example"):
        table.add_column(name, justify="left" if name == "phrase" else "right", overflow="fold")
    for phrase in found.phrases:
        shares = (phrase.share_paid, phrase.share_unpaid, phrase.share_early)
        table.add_row(
            Text(visible(phrase.text)),
            *(f"{100 * share:.0f} %" for share in shares),
            f"{phrase.z:.1f}",
            str(phrase.rollout_ids[0]) if phrase.rollout_ids else "",
        )
    return table


def _print_flag(console: Console, flag: Flag) -> None:
    from rich.text import Text

    from analysis.tokens import visible

    line = Text(f"{flag.kind}: ", style="bold red")
    line.append(visible(flag.sentence), style="default")
    console.print(line, soft_wrap=True)
    console.print(f"  limit: {flag.limit}", style="dim", highlight=False, soft_wrap=True)
    if flag.rollout_ids:
        ids = " ".join(f"--rollout {number}" for number in flag.rollout_ids[:3])
        console.print(
            f"  look: llamarl-hpc rollouts show RUN {ids}", highlight=False, soft_wrap=True
        )
