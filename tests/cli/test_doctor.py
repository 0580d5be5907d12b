"""`llamarl-hpc doctor` through the command line: here, on a login node, and in a container."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm
from tiny_run import cli, write_run_files

_APPTAINER = """#!/bin/sh
# stands for apptainer: notes how it was called, then runs the command "inside"
echo "$@" >> {calls}
while [ "$1" != /images/rl.sif ]; do shift; done
shift
exec "$@"
"""


def write_apptainer(folder: Path) -> Path:
    """A stub; its calls go to `apptainer.calls` beside it."""
    program = folder / "apptainer"
    program.write_text(_APPTAINER.format(calls=folder / "apptainer.calls"))
    program.chmod(0o755)
    return program


@pytest.mark.mpi
def test_nodes_are_looked_at_through_the_container_that_executors_get(tmp_path: Path) -> None:
    apptainer = write_apptainer(tmp_path)
    container = {
        "image": "/images/rl.sif",
        "command": [str(apptainer), "exec", "--bind", "{run_dir}", "{image}"],
        "python": sys.executable,
    }
    launch = {"launcher": "mpiexec", "container": container, "preflight_timeout_s": 100.0}
    file = write_run_files(tmp_path, launch=launch)
    figures = tmp_path / "doctor.json"
    runs = f"runs_dir={tmp_path / 'runs'}"
    answer = cli("doctor", file, "--json", figures, "--set", runs, timeout_s=240.0)
    result = json.loads(figures.read_text())
    # a busy machine may be slow enough for a warning
    assert answer.code == 0 and result["verdict"] in ("ok", "warn"), answer.out + answer.err
    by_name = {finding["name"]: finding for finding in result["findings"]}
    assert by_name["mpi"]["figures"] == {"trainer": 2, "generator": 2, "reward": 2}
    lines = {"generator-reward", "generator-trainer", "reward-trainer"}
    lines |= {f"{role}-controller" for role in ("trainer", "generator", "reward")}
    assert set(by_name["network"]["figures"]["mb_per_s"]) == lines
    assert by_name["space"]["figures"]["needed_mib"] > 0
    assert "enough for two copies of the weights" in by_name["shared_memory"]["sentence"]
    calls = (tmp_path / "apptainer.calls").read_text().splitlines()
    assert len(calls) == 6  # two ranks for each of three roles
    assert all(call.startswith("exec --bind ") and "/images/rl.sif" in call for call in calls)
    assert not (tmp_path / "runs").exists()


def test_on_a_login_node_sbatch_is_asked_and_nothing_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeSlurm(tmp_path / "bin", monkeypatch)
    fake.answer("srun", (0, "slurm 24.05.1\nMPI plugin types are...\n\tpmi2\n\tpmix\n", ""))
    fake.answer(
        "scontrol",
        (0, "Slurmctld(primary) at head is UP", ""),
        (0, "SchedulerType = sched/builtin\n", ""),
    )
    fake.answer("sbatch", (1, "", "sbatch: error: invalid partition specified: gpu"))
    figures = tmp_path / "doctor.json"
    answer = cli(
        "doctor", write_run_files(tmp_path), "--json", figures, "--set", "launch.mpi=cray_shasta"
    )
    assert answer.code == 2
    findings = {f["name"]: f for f in json.loads(figures.read_text())["findings"]}
    broken = [name for name, finding in findings.items() if finding["verdict"] == "fail"]
    assert broken == ["het_jobs", "mpi_flag", "dry_run"]
    assert "srun has no --mpi=cray_shasta (it has pmi2, pmix)" in findings["mpi_flag"]["sentence"]
    assert "invalid partition specified: gpu" in findings["dry_run"]["sentence"]
    (call,) = fake.calls("sbatch")
    assert call["argv"][0] == "--test-only"
    assert "this is a login node" in findings["nodes"]["sentence"]


def test_a_model_that_is_not_there_and_too_many_nodes_are_findings(tmp_path: Path) -> None:
    shape = ["--set", "launch.launcher=mpiexec", "--set", "resources.trainer.nodes=2"]
    answer = cli("doctor", write_run_files(tmp_path), *shape, "--set", "model.path=/nowhere")
    said = " ".join(answer.out.split())
    assert answer.code == 2
    assert "model.path is /nowhere, which is not a folder" in said
    assert "resources.trainer.nodes is 2, but this starts every executor on this machine" in said
