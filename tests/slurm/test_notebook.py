"""The notebook that submits, watches, stops and goes on, on a real Slurm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from notebook_runs import ROOT, execute
from tiny_run import attempts_of, losses_of, write_run_files

NOTEBOOK = ROOT / "experiments" / "notebooks" / "submit_and_watch.ipynb"
pytestmark = [pytest.mark.slurm, pytest.mark.slow]

RESOURCES: dict[str, Any] = {
    "trainer": {"partition": "trainer", "mem": "700M", "time": "5"},
    "generator": {"partition": "generator", "mem": "600M"},
    "reward": {"partition": "reward", "mem": "600M"},
}


@pytest.mark.timeout(700)
def test_submit_and_watch(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_run_files(
        tmp_path,
        resources=RESOURCES,
        trainer={"max_steps": 100_000, "save_steps": 0, "eval_steps": 0},
        evaluation={"num_prompts": 4},
    )
    # as in a notebook that is itself a job: none of it may reach the new one
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "nowhere")
    monkeypatch.setenv("SBATCH_PARTITION", "none")
    settings = {"config": str(config), "changes": {"runs_dir": str(tmp_path / "runs")}}
    (said,) = execute((NOTEBOOK, settings), cwd=tmp_path, timeout_s=300)
    (run,) = (tmp_path / "runs" / "tiny").iterdir()
    first, second = attempts_of(run)
    jobs = [job["id"] for job in json.loads((run / "run.json").read_text())["jobs"]]
    assert (first["outcome"], second["outcome"]) == ("stopped", "done"), said
    assert [first["job_id"], second["job_id"]] == jobs
    assert second["resumed_from_step"] == len(losses_of(run)) - 2
    assert "56 training prompts" not in said and "60 training prompts" in said
    assert "--job-name=tiny" in said and f"job {jobs[0]}" in said
    assert (run / "report.html").is_file()
