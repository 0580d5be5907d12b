"""Command lines of job steps: ranks, threads, and nothing inherited from another MPI."""

import sys
from pathlib import Path

import pytest

from llamarl_hpc.config.schema import Config
from llamarl_hpc.launch.steps import MpiExec, MpiStepLauncher, step_environment
from llamarl_hpc.placement import MARKER, executor_names
from llamarl_hpc.run_dir import RunDir


def config(**resources: object) -> Config:
    return Config.model_validate({"resources": resources})


def test_a_step_starts_the_ranks_that_its_executor_asks_for(tmp_path: Path) -> None:
    launcher = MpiStepLauncher(
        config=config(trainer={"ntasks_per_node": 2, "cpus_per_task": 3}),
        run=RunDir(tmp_path),
        attempt=4,
        mpiexec=MpiExec(path="/opt/mpi/bin/mpiexec", flavour="hydra"),
    )
    command = launcher.command("trainer", instance=2)
    assert command.argv[:5] == ["/opt/mpi/bin/mpiexec", "-bind-to", "none", "-n", "2"]
    assert command.argv[5:] == [
        sys.executable,
        "-m",
        "llamarl_hpc.executors.main",
        f"--run-dir={tmp_path}",
        "--executor=trainer",
        "--attempt=4",
        "--instance=2",
    ]
    assert command.env["OMP_NUM_THREADS"] == "3"
    assert command.env[MARKER] == "trainer"


def test_in_a_container_every_rank_is_started_by_the_containers_program(tmp_path: Path) -> None:
    container = {
        "image": "/i/rl.sif",
        "command": ["apptainer", "exec", "-B", "{run_dir}", "{image}"],
    }
    settings = Config.model_validate({"launch": {"container": container, "extra_args": ["-v"]}})
    launcher = MpiStepLauncher(
        config=settings,
        run=RunDir(tmp_path),
        attempt=1,
        mpiexec=MpiExec(path="mpiexec", flavour="hydra"),
    )
    argv = launcher.command("reward", 1).argv
    inside = ["-v", "apptainer", "exec", "-B", str(tmp_path), "/i/rl.sif", "python3", "-m"]
    assert argv[5:13] == inside
    probe = launcher.probe("reward", ["-m", "x"])
    assert probe.ranks == 2 and probe.command.argv[4:] == ["2", *inside, "x"]


def test_open_mpi_may_be_started_by_root_and_shares_cores() -> None:
    argv = MpiExec(path="mpiexec", flavour="openmpi").argv(4, as_root=True)
    assert argv == [
        "mpiexec",
        "--allow-run-as-root",
        "--oversubscribe",
        "--bind-to",
        "none",
        "-n",
        "4",
    ]
    assert "--allow-run-as-root" not in MpiExec(path="m", flavour="openmpi").argv(1, as_root=False)


def test_variables_of_an_mpi_around_us_do_not_reach_a_step() -> None:
    base = {"PMI_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8", "PATH": "/bin"}
    env = step_environment(config(), "generator.0", base=base)
    assert not {"PMI_RANK", "OMPI_COMM_WORLD_SIZE"} & set(env)
    assert env["PATH"] == "/bin"


def test_executors_are_offline_and_see_a_gpu_only_if_they_ask_for_one() -> None:
    on_cpu = step_environment(config(), "trainer", base={})
    assert on_cpu["HF_HUB_OFFLINE"] == "1" and on_cpu["DS_ACCELERATOR"] == "cpu"
    on_gpu = step_environment(config(trainer={"gpus_per_node": 1}), "trainer", base={})
    assert "CUDA_VISIBLE_DEVICES" not in on_gpu and "DS_ACCELERATOR" not in on_gpu


def test_libraries_are_asked_for_repeatable_sums_unless_the_user_wants_otherwise() -> None:
    repeatable = step_environment(config(), "trainer", base={})
    assert repeatable["MKL_CBWR"] == "AUTO"
    assert repeatable["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert step_environment(config(), "trainer", base={"MKL_CBWR": "AVX2"})["MKL_CBWR"] == "AVX2"
    quick = Config.model_validate({"trainer": {"deterministic": False}})
    assert not {"MKL_CBWR", "CUBLAS_WORKSPACE_CONFIG"} & set(
        step_environment(quick, "trainer", base={})
    )


def test_the_users_environment_wins() -> None:
    settings = Config.model_validate({"launch": {"env": {"OMP_NUM_THREADS": "7"}}})
    assert step_environment(settings, "reward", base={})["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize("replicas", [1, 3])
def test_every_replica_is_an_executor(replicas: int) -> None:
    settings = Config.model_validate({"generator": {"replicas": replicas}})
    names = executor_names(settings)
    assert names == ["trainer", *[f"generator.{k}" for k in range(replicas)], "reward"]


def test_the_mpiexec_of_this_environment_is_found() -> None:
    found = MpiExec.find()
    assert Path(found.path).is_file() and found.flavour in ("openmpi", "hydra")
