"""The live panel: what a terminal echoes must not push it out of place."""

from __future__ import annotations

import io

from rich.console import Console

from llamarl_hpc.observability.progress import ExecutorLine, LiveProgress, Snapshot

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
    assert "train step 1" in drawn and "a note" in drawn
    borders = [line.rstrip() for line in drawn.splitlines() if "\u256e" in line]
    assert borders and all(
        line.index("\u256e") - line.index("\u256d") + 1 == WIDTH - 2 for line in borders
    )
