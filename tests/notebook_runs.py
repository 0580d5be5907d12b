"""Notebooks executed as a person would: one kernel, cells in order, settings of the first cell
replaced."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(
    path for folder in ("analysis", "experiments") for path in (ROOT / folder).rglob("*.ipynb")
)


def execute(
    *notebooks: tuple[Path, Mapping[str, object]], cwd: Path, timeout_s: float
) -> list[str]:
    """Run all cells in `cwd`, with the given settings in place of the cell that is tagged
    `parameters`; what each notebook put out, as text. Raises nbclient's CellExecutionError.

    They share one kernel, for the time that it takes to start, but no names.
    """
    together = nbformat.v4.new_notebook()
    ends = []
    for path, settings in notebooks:
        cells = nbformat.read(path, as_version=4).cells
        (cell,) = (c for c in cells if "parameters" in c.metadata.get("tags", []))
        cell.source = "".join(f"{name} = {value!r}\n" for name, value in settings.items())
        together.cells += [*cells, nbformat.v4.new_code_cell("%reset -f")]
        ends.append(len(together.cells))
    NotebookClient(
        together, timeout=timeout_s, startup_timeout=120, resources={"metadata": {"path": str(cwd)}}
    ).execute()
    return [
        "\n".join(_shown(o) for cell in together.cells[a:b] for o in cell.get("outputs", []))
        for a, b in zip([0, *ends[:-1]], ends, strict=True)
    ]


def _shown(output: Any) -> str:
    return str(output.get("text") or output.get("data", {}).get("text/plain", ""))
