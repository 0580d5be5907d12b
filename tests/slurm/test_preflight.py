"""The nodes of a real heterogeneous job, looked at before a run: in order, and broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from tiny_run import attempts_of, cli, write_run_files

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(450)]

PARTITIONS: dict[str, Any] = {
    "trainer": {"partition": "trainer", "nodes": 2, "mem": "500M", "time": "10"},
    "generator": {"partition": "generator", "mem": "400M"},
    "reward": {"partition": "reward", "mem": "400M"},
}
PATIENT = {"preflight_timeout_s": 120.0}  # the machine may be busy with other tests
_JOB = """#!/bin/bash
#SBATCH --output={folder}/job.log
#SBATCH --time=10
#SBATCH --partition=trainer --nodes=2 --ntasks-per-node=1 --mem=500M
#SBATCH hetjob
#SBATCH --partition=generator --ntasks=1 --mem=400M
#SBATCH hetjob
#SBATCH --partition=reward --ntasks=1 --mem=400M
exec {python} -m llamarl_hpc.cli.main doctor {config} --json {folder}/doctor.json
"""


def test_the_nodes_of_a_job_in_order_pass(cluster: Cluster, tmp_path: Path) -> None:
    file = write_run_files(tmp_path, resources=PARTITIONS, launch=PATIENT)
    script = tmp_path / "job.sh"
    script.write_text(_JOB.format(folder=tmp_path, config=file, python=sys.executable))
    subprocess.run(
        ["sbatch", script],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=30.0,
        check=True,
    )
    deadline = time.monotonic() + 300.0  # sbatch --wait looks too seldom
    while not (tmp_path / "doctor.json").exists():
        assert time.monotonic() < deadline, (tmp_path / "job.log").read_text()
        time.sleep(0.2)
    log = (tmp_path / "job.log").read_text()
    findings = json.loads((tmp_path / "doctor.json").read_text())["findings"]
    by_name = {finding["name"]: finding for finding in findings}
    # warnings: a folder on a disk of this machine, and how slow a busy machine may be
    assert [f["sentence"] for f in findings if f["verdict"] == "fail"] == [], log
    assert by_name["mpi"]["figures"] == {"trainer": 2, "generator": 2, "reward": 2}
    assert len(by_name["network"]["figures"]["mb_per_s"]) == 6
    assert by_name["steps"]["sentence"] == "a step started in trainer, generator, reward"


def test_a_wrong_mpi_flag_stops_a_run_before_its_executors_start(
    cluster: Cluster, tmp_path: Path
) -> None:
    file = write_run_files(tmp_path, resources=PARTITIONS, launch=PATIENT)
    run, start = tmp_path / "run", time.time()
    more = ["--run-dir", run, "--preflight", "--wait", "--set", "launch.mpi=none"]
    answer = cli("submit", file, *more, timeout_s=300.0)
    (attempt,) = attempts_of(run)
    assert (answer.code, attempt["outcome"], attempt["exit_code"]) == (2, "failed", 2), answer
    assert "the preflight found what would break the run" in attempt["reason"]
    assert "the launcher started 2 ranks but MPI sees 1" in attempt["reason"]
    assert "set launch.mpi" in attempt["reason"]
    assert attempt["started"] > start and attempt["ended"] - attempt["started"] < 120.0
    folder = run / "latest"
    result = json.loads((folder / "preflight.json").read_text())
    assert [f["name"] for f in result["findings"] if f["verdict"] == "fail"] == ["mpi"]
    assert "ERROR preflight mpi:" in (folder / "controller.0.log").read_text()
    assert not list(folder.glob("trainer.*"))  # no executor has started
