"""What a run cost, as tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.table import Table

    from analysis.cost import CostSheet


def cost_tables(sheet: CostSheet) -> list[Table]:
    """Executors, then everything else."""
    from rich.table import Table

    from analysis.cost_text import cost_lines, executor_rows

    executors = Table(title="cost, by executor", title_justify="left")
    for name in ("executor", "devices", "device-hours", "idle"):
        justify: Literal["left", "right"] = "left" if name == "executor" else "right"
        executors.add_column(name, justify=justify, overflow="fold")
    for row in executor_rows(sheet):
        executors.add_row(*row)
    whole = Table.grid(padding=(0, 2))
    for line in cost_lines(sheet):
        whole.add_row(*line)
    return [executors, whole]
