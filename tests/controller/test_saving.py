"""The best checkpoint is chosen when both its files and its accuracy are there, in any order."""

from __future__ import annotations

from pathlib import Path

from llamarl_hpc.controller.saving import Best
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.storage.checkpoint import CheckpointStore


def test_the_best_is_chosen_whichever_comes_first(tmp_path: Path) -> None:
    store = CheckpointStore(RunDir(tmp_path), 1)
    best = Best(store)

    def save(step: int, version: int) -> None:
        store.begin(step)
        store.commit(step, {})
        best.on_complete(step, version)

    def chosen() -> tuple[int, float] | None:
        found = store.best()
        return None if found is None else (found["step"], found["accuracy"])

    best.on_accuracy(0, 0.9)  # of the model that the run began with: no checkpoint
    save(2, version=2)
    assert chosen() is None
    best.measuring = 3
    save(4, version=3)  # one batch made no step
    assert store.waits_for_accuracy == 4
    save(5, version=4)
    assert (tmp_path / "checkpoints" / "step_000004").is_dir()
    best.on_accuracy(3, 0.5)
    assert chosen() == (4, 0.5) and store.waits_for_accuracy is None
    best.on_accuracy(5, 0.6)
    save(6, version=5)
    assert chosen() == (6, 0.6)
    save(7, version=6)
    best.on_accuracy(6, 0.6)  # no better
    assert chosen() == (6, 0.6)
