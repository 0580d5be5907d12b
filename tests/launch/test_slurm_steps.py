"""Job steps of srun: every size is written, nothing is inherited, and nodes are given out."""

from __future__ import annotations

import os
import signal
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from llamarl_hpc.config.schema import Config, ResourceConfig
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.launch.allocation import NodeSet, allocation, inside_allocation, outside_allocation
from llamarl_hpc.launch.packing import pack
from llamarl_hpc.launch.srun import Srun, SrunStepLauncher, plan
from llamarl_hpc.launch.starter import find_starter, is_one_host
from llamarl_hpc.launch.steps import MpiExec
from llamarl_hpc.placement import ONE_HOST
from llamarl_hpc.placement import (
    is_one_host as executors_share_a_host,
)
from llamarl_hpc.run_dir import RunDir

ORDINARY = {
    "SLURM_JOB_ID": "55",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
}
HETEROGENEOUS = {
    "SLURM_JOB_ID": "700",
    "SLURM_JOB_NODELIST": "a1",
    "SLURM_HET_SIZE": "3",
    **{f"SLURM_JOB_ID_HET_GROUP_{k}": f"{700 + k}" for k in range(3)},
    "SLURM_JOB_NODELIST_HET_GROUP_0": "a[01-02]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "b1",
    "SLURM_JOB_NODELIST_HET_GROUP_2": "c1",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "72(x2)",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "36",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_2": "4",
}
# what interactive sessions and other requests leave behind
LEFT_BEHIND = {
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x3",
    "SLURM_CPU_BIND_LIST": "0x3",
    "SLURM_NTASKS": "1",
    "SLURM_NTASKS_PER_NODE": "8",
    "SLURM_GPUS_PER_TASK": "1",
    "SLURM_TRES_PER_TASK": "gres/gpu=1",
    "SLURM_CPUS_PER_TASK": "4",
    "SRUN_CPUS_PER_TASK": "4",
    "SLURM_MEM_PER_CPU": "4000",
    "SLURM_EXPORT_ENV": "NONE",
    "SBATCH_MEM_PER_GPU": "10G",
    "PMI_RANK": "0",
    "PMIX_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "8",
}


def config(**blocks: Any) -> Config:
    return Config.model_validate(blocks)


def launcher(settings: Config, environ: dict[str, str], **changes: Any) -> SrunStepLauncher:
    job = allocation(environ)
    assert job is not None
    srun = Srun(
        path="/usr/bin/srun",
        allocation=job,
        mpi=changes.pop("mpi", "pmix"),
        packing=plan(settings, job, gpus_per_node=changes.pop("gpus_per_node", 0)),
    )
    return SrunStepLauncher(config=settings, run=RunDir(Path("/r")), attempt=2, srun=srun)


# ------------------------------------------------------------------ command lines


def test_an_executor_of_a_heterogeneous_job_is_a_step_on_its_component() -> None:
    settings = config(
        resources={"trainer": {"nodes": 2, "ntasks_per_node": 4, "cpus_per_task": 9}},
        rollout={"prompts_per_step": 16},
    )
    command = launcher(settings, HETEROGENEOUS).command("trainer", instance=3)
    assert command.argv == [
        "/usr/bin/srun",
        "--het-group=0",
        "--nodes=2",
        "--ntasks=8",
        "--ntasks-per-node=4",
        "--cpus-per-task=9",
        "--mem=0",
        "--kill-on-bad-exit=1",
        "--wait=60",
        "--job-name=trainer",
        "--export=ALL",
        "--mpi=pmix",
        "--exact",
        "--cpu-bind=cores",
        "--unbuffered",
        sys.executable,
        "-m",
        "llamarl_hpc.executors.main",
        "--run-dir=/r",
        "--executor=trainer",
        "--attempt=2",
        "--instance=3",
    ]
    assert command.end_with == signal.SIGTERM
    assert command.env["OMP_NUM_THREADS"] == "9"


@pytest.mark.parametrize(
    ("executor", "group"), [("trainer", 0), ("generator.0", 1), ("generator.1", 1), ("reward", 2)]
)
def test_every_executor_goes_to_its_component(executor: str, group: int) -> None:
    argv = launcher(config(), HETEROGENEOUS).command(executor, 1).argv
    assert f"--het-group={group}" in argv
    assert "--cpus-per-task=1" in argv


@pytest.mark.parametrize(
    ("block", "option"),
    [
        ({"gpus_per_node": 4}, "--gpus-per-node=4"),
        ({"gpus_per_node": 4, "gpu_type": "a100"}, "--gpus-per-node=a100:4"),
        ({"gpus_per_node": 4, "gpu_type": "a100", "gpu_request": "gres"}, "--gres=gpu:a100:4"),
        # ranks choose among all GPUs of the step, by local rank
        (
            {"gpus_per_node": 4, "ntasks_per_node": 4, "gpu_request": "gpus_per_task"},
            "--gpus-per-node=4",
        ),
    ],
)
def test_gpus_are_asked_for_as_the_site_wants_it(block: dict[str, Any], option: str) -> None:
    argv = launcher(config(resources={"trainer": block}), HETEROGENEOUS).command("trainer", 1).argv
    gpu_options = [a for a in argv if a.startswith(("--gpus", "--gres"))]
    assert gpu_options == [option]


def test_steps_of_an_ordinary_job_get_nodes_and_no_gpu_that_they_did_not_ask_for() -> None:
    settings = config(
        resources={"trainer": {"gpus_per_node": 4}, "generator": {"gpus_per_node": 2}},
    )
    steps = launcher(settings, ORDINARY, gpus_per_node=4)
    argv = {name: steps.command(name, 1).argv for name in ("trainer", "generator.1", "reward")}
    assert "--nodelist=n1" in argv["trainer"] and "--gpus-per-node=4" in argv["trainer"]
    assert "--nodelist=n2" in argv["generator.1"] and "--gpus-per-node=2" in argv["generator.1"]
    assert "--gres=none" in argv["reward"] and "--exact" in argv["reward"]
    assert not [a for line in argv.values() for a in line if a.startswith("--het-group")]


def test_executors_share_cores_where_the_job_has_too_few() -> None:
    small = ORDINARY | {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_CPUS_PER_NODE": "2"}
    steps = launcher(config(), small)
    assert "--exact" in steps.command("generator.0", 1).argv
    crowded = steps.command("reward", 1).argv
    assert "--overlap" in crowded and "--overcommit" in crowded and "--cpu-bind=none" in crowded


def test_the_sites_default_mpi_is_left_alone_and_extra_arguments_come_last() -> None:
    settings = config(launch={"extra_args": ["--cpu-bind=none"]})
    argv = launcher(settings, HETEROGENEOUS, mpi=None).command("reward", 1).argv
    assert not [a for a in argv if a.startswith("--mpi")]
    assert argv.index("--cpu-bind=none") > argv.index("--cpu-bind=cores")


# ------------------------------------------------------------------ probes


def test_a_probe_is_bound_as_executors_are_and_has_two_ranks_at_least() -> None:
    settings = config(
        resources={"trainer": {"nodes": 2, "ntasks_per_node": 4}},
        rollout={"prompts_per_step": 16},
        generator={"replicas": 1},
    )
    steps = launcher(settings, HETEROGENEOUS)
    trainer, generator = (steps.probe(role, ["-m", "x"]) for role in ("trainer", "generator"))
    assert (trainer.ranks, trainer.is_real) == (8, True)
    assert trainer.command.argv[1:3] == ["--het-group=0", "--nodes=2"]
    assert "--exact" in trainer.command.argv and trainer.command.argv[-3:] == [
        sys.executable,
        "-m",
        "x",
    ]
    assert (generator.ranks, generator.is_real) == (2, False)
    assert {"--het-group=1", "--ntasks=2", "--overcommit"} <= set(generator.command.argv)


def test_a_probe_in_an_ordinary_job_sees_all_nodes_of_its_role() -> None:
    settings = config(resources={"generator": {"cpus_per_task": 8}}, generator={"replicas": 2})
    probe = launcher(settings, ORDINARY).probe("generator", ["-m", "x"])
    assert (probe.ranks, probe.is_real) == (2, False)
    assert "--nodelist=n1,n2" in probe.command.argv and "--gres=none" in probe.command.argv


# ------------------------------------------------------------------ environment


def test_nothing_that_srun_takes_for_an_option_reaches_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (HETEROGENEOUS | LEFT_BEHIND).items():
        monkeypatch.setenv(name, value)
    env = launcher(config(), HETEROGENEOUS).command("trainer", 1).env
    assert sorted(set(env) & set(LEFT_BEHIND)) == []
    assert env["SLURM_JOB_ID"] == "700" and env["SLURM_JOB_NODELIST_HET_GROUP_1"] == "b1"
    assert env[ONE_HOST] == "0" and env["PATH"] == os.environ["PATH"]


def test_commands_about_other_jobs_know_nothing_of_this_one() -> None:
    environ = HETEROGENEOUS | LEFT_BEHIND | {"SLURM_CONF": "/etc/slurm.conf", "HOME": "/home/me"}
    assert outside_allocation(environ) == {"SLURM_CONF": "/etc/slurm.conf", "HOME": "/home/me"}
    assert set(inside_allocation(LEFT_BEHIND)) == set()


def test_steps_are_told_whether_they_share_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert executors_share_a_host(config())
    monkeypatch.setenv(ONE_HOST, "0")
    assert not executors_share_a_host(config())
    monkeypatch.setenv(ONE_HOST, "1")
    assert executors_share_a_host(config(resources={"trainer": {"partition": "gpu"}}))


# ------------------------------------------------------------------ who starts executors


@pytest.fixture
def fake_srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "srun"
    program.write_text("#!/bin/sh\necho 'MPI plugin types are...'\nprintf 'pmi2\\nnone\\n'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return program


def test_a_batch_script_and_a_shell_of_salloc_start_job_steps(fake_srun: Path) -> None:
    for extra in ({}, {"SLURM_STEP_ID": "4294967290"}):
        starter = find_starter(config(), ORDINARY | extra)
        assert isinstance(starter, Srun) and starter.path == str(fake_srun)
        assert starter.allocation.job_id == "55" and not is_one_host(starter)


def test_a_process_in_a_job_step_stays_on_its_machine(fake_srun: Path) -> None:
    notebook = ORDINARY | {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}
    assert isinstance(find_starter(config(), notebook), MpiExec)
    wanted = config(launch={"launcher": "srun"})
    assert isinstance(find_starter(wanted, notebook), Srun)


def test_outside_of_slurm_it_is_mpiexec(fake_srun: Path) -> None:
    assert isinstance(find_starter(config(), {}), MpiExec)
    assert isinstance(find_starter(config(launch={"launcher": "mpiexec"}), ORDINARY), MpiExec)
    with pytest.raises(ConfigError, match="not inside a Slurm job"):
        find_starter(config(launch={"launcher": "srun"}), {})


def test_several_nodes_need_a_slurm_job() -> None:
    with pytest.raises(ConfigError, match=r"resources\.trainer\.nodes is 2"):
        find_starter(config(resources={"trainer": {"nodes": 2}}), {})


def test_the_mpi_flag_is_one_that_srun_has(fake_srun: Path) -> None:
    def flag(mpi: str) -> str | None:
        starter = find_starter(config(launch={"mpi": mpi}), ORDINARY)
        assert isinstance(starter, Srun)
        return starter.mpi

    hydra = MpiExec.find().flavour == "hydra"
    assert flag("auto") == ("pmi2" if hydra else None)  # this srun has no pmix
    assert flag("default") is None and flag("cray_shasta") == "cray_shasta"


def test_a_job_of_another_shape_is_refused(fake_srun: Path) -> None:
    two = HETEROGENEOUS | {"SLURM_HET_SIZE": "2"}
    with pytest.raises(ConfigError, match="has 2 components but this run has 3"):
        find_starter(config(), two)
    three_nodes = config(resources={"trainer": {"nodes": 3}}, rollout={"prompts_per_step": 15})
    with pytest.raises(ConfigError, match=r"component 0 .* has 2 node\(s\) but resources.trainer"):
        find_starter(three_nodes, HETEROGENEOUS)


# ------------------------------------------------------------------ giving out nodes


def block(**values: Any) -> ResourceConfig:
    return ResourceConfig.model_validate(values)


def test_gpus_are_packed_so_that_the_trainer_finds_whole_nodes() -> None:
    nodes = NodeSet(nodes=["n1", "n2"], cpus=[8, 8])
    executors = {
        "trainer": block(gpus_per_node=2),
        "generator.0": block(gpus_per_node=1),
        "generator.1": block(gpus_per_node=1),
        "reward": block(cpus_per_task=8),
    }
    packing = pack(executors, nodes, gpus_per_node=2)
    assert packing.nodes_of == {
        "trainer": ["n1"],
        "generator.0": ["n2"],
        "generator.1": ["n2"],
        "reward": ["n1"],  # the first of those with most free cores
    }
    assert packing.crowded == {"reward"}


def test_too_few_gpus_or_nodes_are_an_error_that_counts() -> None:
    nodes = NodeSet(nodes=["n1"], cpus=[8])
    with pytest.raises(ConfigError, match=r"generator\.0 wants 1 node\(s\) with 1 free GPUs"):
        pack(
            {"trainer": block(gpus_per_node=2), "generator.0": block(gpus_per_node=1)},
            nodes,
            gpus_per_node=2,
        )
    with pytest.raises(ConfigError, match=r"trainer wants 2 node\(s\) and there are 1"):
        pack({"trainer": block(nodes=2)}, nodes, gpus_per_node=0)
