"""Batch script and command lines of job steps on every site that has a profile.

A wanted change: UPDATE_GOLDEN=1 pytest tests/launch/test_sites.py, and read the diff.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from llamarl_hpc.config.load import load_config
from llamarl_hpc.config.schema import Config
from llamarl_hpc.config.site import site_names
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.launch.allocation import allocation
from llamarl_hpc.launch.site import check_limits
from llamarl_hpc.launch.srun import Srun, SrunStepLauncher, plan
from llamarl_hpc.launch.submit import check_submittable, run_script
from llamarl_hpc.run_dir import RunDir

GOLDEN = Path(__file__).parent / "golden"
# what users of such machines ask for: whole nodes for the trainer, replicas that share nodes
GPUS = {"frontier": 8, "lumi": 8}
CORES = {"frontier": 7, "lumi": 7, "leonardo": 8, "juwels_booster": 12, "alps_clariden": 72}
CONTAINERS = {"lumi": "/scratch/me/rl.sif", "alps_clariden": "rl", "perlmutter": "me/rl:1"}


def config(site: str, folder: Path) -> Config:
    gpus, cores = GPUS.get(site, 4), CORES.get(site, 16)
    values: dict[str, Any] = {
        "data": {"tasks": [{"name": "chain_sum"}]},
        "rollout": {"prompts_per_step": 2 * gpus},
        "generator": {"replicas": gpus, "replicas_per_node": gpus},
        "launch": {"site": site, "container": {"image": CONTAINERS.get(site)}},
        "resources": {
            "trainer": {
                "account": "m1234",
                "nodes": 2,
                "ntasks_per_node": gpus,
                "gpus_per_node": gpus,
                "cpus_per_task": cores,
                "time": "04:00:00",
            },
            "generator": {"account": "m1234", "gpus_per_node": 1, "cpus_per_task": cores},
            "reward": {"account": "m1234", "cpus_per_task": 16},
        },
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(values))
    return load_config(file)


def steps(settings: Config) -> str:
    """Command lines of one step of each executor, an argument a line, and what the site adds to
    the environment of all."""
    environ = {
        "SLURM_JOB_ID": "700",
        "SLURM_JOB_NODELIST": "a1",
        "SLURM_HET_SIZE": "3",
        "SLURM_JOB_ID_HET_GROUP_0": "700",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "a[1-2]",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "b1",
        "SLURM_JOB_NODELIST_HET_GROUP_2": "c1",
    }
    job = allocation(environ)
    assert job is not None
    mpi = {"auto": "pmi2", "default": None}.get(settings.launch.mpi, settings.launch.mpi)
    launcher = SrunStepLauncher(
        config=settings,
        run=RunDir(Path("/scratch/me/runs/r1")),
        attempt=1,
        srun=Srun(
            path="srun", allocation=job, mpi=mpi, packing=plan(settings, job, gpus_per_node=0)
        ),
    )
    env = launcher.command("trainer", 1).env
    blocks = [f"{name}={env[name]}" for name in settings.launch.env]
    for executor in ("trainer", "generator.0", "reward"):
        command = launcher.command(executor, 1)
        blocks.append("\n    ".join([f"# {executor}\n{command.argv[0]}", *command.argv[1:]]))
    return "\n".join(blocks) + "\n"


@pytest.mark.parametrize("site", site_names())
def test_scripts_and_steps_of_a_site_are_what_was_recorded(
    site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SCRATCH", "PSCRATCH"):
        monkeypatch.delenv(name, raising=False)
    settings = config(site, tmp_path)
    run = Path("/scratch/me/runs/r1")
    check_submittable(settings, run)
    texts = {"sbatch": run_script(settings, run), "steps": steps(settings)}
    for kind, text in texts.items():
        plain = text.replace(sys.executable, "/env/bin/python")
        path = GOLDEN / f"site_{site}.{kind}"
        if os.environ.get("UPDATE_GOLDEN"):
            path.write_text(plain)
        assert plain == path.read_text()
    done = subprocess.run(["bash", "-n", GOLDEN / f"site_{site}.sbatch"], check=False)
    assert done.returncode == 0


def test_runs_go_where_the_site_has_its_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSCRATCH", "/pscratch/sd/m/me")
    assert config("perlmutter", tmp_path).runs_dir == "/pscratch/sd/m/me/llamarl-runs"


def with_limits(
    folder: Path, limits: dict[str, Any], requeue: str | None = None, **resources: Any
) -> Config:
    profile = {"title": "Here", "cpu_nodes": {"partition": "cpu"}, "limits": limits}
    (folder / "here.yaml").write_text(yaml.safe_dump(profile))
    file = folder / "config.yaml"
    launch = {"site": str(folder / "here.yaml")} | ({"requeue": requeue} if requeue else {})
    values = {"data": {"path": "x"}, "launch": launch, "resources": resources}
    file.write_text(yaml.safe_dump(values))
    return load_config(file)


def test_what_a_site_is_known_to_forbid_is_not_submitted(tmp_path: Path) -> None:
    no_het = {"het_jobs": False}
    with pytest.raises(ConfigError, match=r"Here does not allow heterogeneous jobs"):
        check_submittable(with_limits(tmp_path, no_het), tmp_path / "r")
    check_limits(with_limits(tmp_path, no_het, job={"nodes": 1}))


def test_a_time_above_the_sites_limit_is_refused_on_the_partition_it_is_for(
    tmp_path: Path,
) -> None:
    limits = {"max_time": "12:00:00"}
    with pytest.raises(ConfigError, match=r"trainer.time is 1-00 but Here allows 12:00:00 on cpu"):
        check_limits(with_limits(tmp_path, limits, trainer={"time": "1-00"}))
    check_limits(with_limits(tmp_path, limits, trainer={"time": "12:00:00"}))
    check_limits(with_limits(tmp_path, limits, trainer={"time": "1-00", "partition": "long"}))
    check_limits(with_limits(tmp_path, limits, trainer={"time": "1-00", "qos": "long"}))


def test_where_jobs_are_not_requeued_a_run_goes_on_in_new_ones(tmp_path: Path) -> None:
    for limits, default in (({}, "auto"), ({"requeue": True}, "auto")):
        assert with_limits(tmp_path, limits).launch.requeue == default
    no_requeue = {"requeue": False}
    assert with_limits(tmp_path, no_requeue).launch.requeue == "resubmit"
    assert with_limits(tmp_path, no_requeue, requeue="never").launch.requeue == "never"
    with pytest.raises(ConfigError, match=r"launch.requeue is requeue but Here does not requeue"):
        check_limits(with_limits(tmp_path, no_requeue, requeue="requeue"))
