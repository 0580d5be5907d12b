"""The notebooks run from the first cell to the last, and are stored clean."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from notebook_runs import NOTEBOOKS, ROOT, execute
from synthetic_run import Plan, make_run

from analysis.read_run import Run

FOLDER = ROOT / "analysis" / "notebooks"
PLAN = Plan(num_steps=12, prompts_per_step=4, num_generations=4, heldout=16, eval_steps=6)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None
        assert set(cell.metadata) <= {"tags"} and cell.source.isascii()
        assert max(map(len, cell.source.splitlines())) <= 100
    assert [cell.metadata.get("tags") for cell in notebook.cells].count(["parameters"]) == 1


def test_the_notebooks_answer_from_the_first_cell_to_the_last(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", PLAN).path
    other = make_run(tmp_path / "other", Plan(**{**vars(PLAN), "max_staleness": 0})).path
    look, compare, time = execute(
        (FOLDER / "look_at_a_run.ipynb", {"folder": str(run)}),
        (FOLDER / "compare_runs.ipynb", {"folders": {"old": str(run), "new": str(other)}}),
        (FOLDER / "where_did_the_time_go.ipynb", {"folder": str(run), "attempt": None}),
        cwd=tmp_path,
        timeout_s=120,
    )
    first, last = (Run.open(run).evaluations()[k].accuracy for k in (0, -1))
    assert f"{first:.3f} -> {last:.3f}, change {last - first:+.3f}" in look
    assert "advantage +" in look and "{'trained': 48} {} sound" in look

    assert "algorithm.max_staleness" in compare and "old -> new:" in compare
    assert "over 16 questions" in compare and "'in_both': 12" in compare

    assert "a step takes 8.00 s: generation " in time
    assert "the slower side is generation: more replicas would help most" in time
