"""Tables of many columns, for terminals that are not wide."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table


def narrow_table(title: str, columns: Iterable[str]) -> Table:
    """Without lines between columns, which cost two characters each; numbers to the right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in columns:
        table.add_column(Text(name), justify="right", overflow="fold")
    return table
