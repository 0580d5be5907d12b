"""How things look in a cell: plain text elsewhere, a little HTML in a notebook.

HTML takes its colours from the page, so that it is readable in light and dark.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

_FAINT = "opacity:.65"
_CELL = "text-align:left;padding:.15em .9em .15em 0;border:0;vertical-align:top"


class Text(str):
    """Text that a cell shows line by line, and that is an ordinary string otherwise."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return (
            '<pre style="max-height:32em;overflow:auto;line-height:1.35;margin:0">'
            f"{escape(str(self))}</pre>"
        )


def html_rows(rows: Iterable[tuple[str, str]], title: str = "") -> str:
    """A table of names and values (values are HTML)."""
    body = "".join(
        f'<tr style="background:none"><td style="{_CELL};{_FAINT}">{escape(name)}</td>'
        f'<td style="{_CELL}">{value}</td></tr>'
        for name, value in rows
    )
    head = f'<div style="font-weight:600;margin:.2em 0">{title}</div>' if title else ""
    return f'<div>{head}<table style="border-collapse:collapse;margin:0">{body}</table></div>'


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A small table; everything is text."""
    names = "".join(f'<th style="{_CELL};{_FAINT};font-weight:400">{escape(n)}</th>' for n in head)
    body = "".join(
        '<tr style="background:none">'
        + "".join(f'<td style="{_CELL}">{escape(value)}</td>' for value in row)
        + "</tr>"
        for row in rows
    )
    return (
        f'<table style="border-collapse:collapse;margin:.4em 0 0">'
        f'<tr style="background:none">{names}</tr>{body}</table>'
    )


def html_details(summary: str, text: str) -> str:
    """Text that opens at a click."""
    return (
        f'<details style="margin-top:.4em"><summary style="cursor:pointer;{_FAINT}">'
        f"{escape(summary)}</summary>{Text(text)._repr_html_()}</details>"
    )


class Slot:
    """A place in the output of the running cell whose content can be replaced."""

    def __init__(self) -> None:
        self._handle: Any = None

    @staticmethod
    def is_there() -> bool:
        """Whether this is a notebook; in plain Python there is nothing to replace."""
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython is not None else None
        return shell is not None and hasattr(shell, "kernel")

    def show(self, content: object) -> None:
        """Put `content` into the place."""
        from IPython.display import display

        if self._handle is None:
            self._handle = display(content, display_id=True)
        else:
            self._handle.update(content)
