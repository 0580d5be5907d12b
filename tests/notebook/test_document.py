"""The code of docs/notebooks.md runs, on a pretended run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from synthetic_run import Plan, make_run
from test_documents import ROOT, blocks

from llamarl_hpc.notebook import Experiment, Run


def test_the_document_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan(num_steps=5, prompts_per_step=2, num_generations=2, heldout=4, eval_steps=5)
    folder = make_run(tmp_path / "r", plan)
    folder.log(1, "generator.0", 0).write_text("said by a generator\n")
    resumed: list[Any] = []
    # the rim: a cluster, and the small model's package
    monkeypatch.setattr(Experiment, "check", lambda self: "40 training prompts")
    monkeypatch.setattr(Experiment, "submit", lambda self: Run(folder))
    monkeypatch.setattr(Run, "resume", lambda self, changes: resumed.append(changes))
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    for block in blocks(ROOT / "docs" / "notebooks.md", "python"):
        exec(block, names)
    out = capsys.readouterr().out
    assert "#SBATCH --job-name=short" in out and "done  5 of 5 steps" in out
    assert "said by a generator" in out and "nothing to cancel: the run is done" in out
    assert resumed == [{"trainer.max_steps": 20}] and names["run"].path == folder.path
    assert names["experiment"].config.trainer.max_steps == 100
