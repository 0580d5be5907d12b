"""The live panel: what a terminal echoes must not push it out of place; and the plain line."""

from __future__ import annotations

import io

from rich.console import Console

from llamarl_hpc.observability.progress import ExecutorLine, LiveProgress, Snapshot, step_line

WIDTH = 90


def test_the_panel_leaves_room_for_the_echo_of_ctrl_c() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=WIDTH, color_system=None)
    progress = LiveProgress(console)
    executor = ExecutorLine(name="trainer", activity="train step 1", version=1)
    snapshot = Snapshot(
        phase="train", step=1, max_steps=4, policy_version=1, elapsed_s=3.0, executors=[executor]
    )
    progress.step(snapshot)
    progress.note("a note")
    progress.close()
    assert isinstance(console.file, io.StringIO)
    drawn = console.file.getvalue()
    assert "train step 1" in drawn and "1 of 4 steps" in drawn and "a note" in drawn
    borders = [line.rstrip() for line in drawn.splitlines() if "\u256e" in line]
    assert borders and all(
        line.index("\u256e") - line.index("\u256d") + 1 == WIDTH - 2 for line in borders
    )


def test_a_line_names_the_step_as_the_store_does_and_counts_those_made() -> None:
    snapshot = Snapshot(phase="train", step=12, max_steps=40, policy_version=12, elapsed_s=3.0)
    assert step_line(snapshot).startswith("step   11 (12/40)  reward ")
