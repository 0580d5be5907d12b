"""Figures for notebooks: a run, or several to compare, as panels of one matplotlib figure.

    figure(run)                                        reward, accuracy, staleness, ... 2 x 3
    figure({"a": one, "b": other}, ["reward", "accuracy"])
    figure(run).savefig("run.png")

The panels and their names are in `panels.py`. Nothing touches pyplot's global state.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from analysis.panels import OVERVIEW, PANELS, Runs, has_data, style
from analysis.read_run import Run
from llamarl_hpc.errors import ConfigError

_DPI = 110


class Picture(Figure):
    """A matplotlib figure that a notebook shows when it is the value of a cell."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=_DPI)
        return file.getvalue()


def new_picture(width: float, height: float) -> Picture:
    """White, whatever the notebook's theme; sizes are inches."""
    spaced = ConstrainedLayoutEngine(w_pad=0.09, h_pad=0.06)
    return Picture(figsize=(width, height), layout=spaced, facecolor="white")


def figure(
    runs: Run | Runs, panels: Sequence[str] | None = None, *, columns: int = 3, title: str = ""
) -> Picture:
    """The panels side by side. Raises ConfigError for a panel that there is not."""
    chosen = list(panels or OVERVIEW)
    if wrong := [name for name in chosen if name not in PANELS]:
        raise ConfigError(f"there is no panel '{wrong[0]}'; panels are {', '.join(PANELS)}")
    named = {"": runs} if isinstance(runs, Run) else dict(runs)
    columns = min(columns, len(chosen))
    rows = math.ceil(len(chosen) / columns)
    picture = new_picture(3.9 * columns if columns > 1 else 5.4, 2.75 * rows + 0.3)
    for index, name in enumerate(chosen, start=1):
        axes = picture.add_subplot(rows, columns, index)
        style(axes)
        PANELS[name](axes, named)
        if not has_data(axes):
            axes.text(0.5, 0.5, "nothing yet", ha="center", color="0.5", transform=axes.transAxes)
            axes.set(xticks=[], yticks=[])
    if title:
        picture.suptitle(title, x=0.01, ha="left", fontsize=10)
    return picture
