"""`llamarl-hpc submit`: the scripts it writes, what it refuses, and how it submits.

A wanted change of a script: UPDATE_GOLDEN=1 pytest tests/cli/test_submit.py, and read the diff.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm
from tiny_run import cli, write_run_files

from llamarl_hpc.config.load import load_config
from llamarl_hpc.config.schema import Config
from llamarl_hpc.launch.request import components_of
from llamarl_hpc.launch.slurm import HetSlurmExecutor
from llamarl_hpc.launch.submit import run_script, script_by_hand
from llamarl_hpc.run_dir import RunDir

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "launch" / "golden"

HOMOGENEOUS = [
    "resources.job.partition=gpu",
    "resources.job.nodes=2",
    "resources.job.ntasks_per_node=5",
    "resources.job.cpus_per_task=8",
    "resources.job.gpus_per_node=4",
    "resources.job.mem=0",
    "resources.job.time=04:00:00",
]

# what sites ask for, by the shape of their requests
SHAPES: dict[str, dict[str, Any]] = {
    "three_partitions_cpu": {
        "resources": {
            "trainer": {"partition": "trainer", "nodes": 2, "ntasks_per_node": 2, "time": "90"},
            "generator": {"partition": "generator"},
            "reward": {"partition": "reward", "cpus_per_task": 16},
        },
    },
    "gpus_per_node_typed": {
        "generator": {"replicas": 8, "replicas_per_node": 4},
        "resources": {
            "trainer": {
                "partition": "gpu-a100",
                "nodes": 4,
                "ntasks_per_node": 4,
                "gpus_per_node": 4,
                "gpu_type": "a100",
                "cpus_per_task": 16,
                "mem": "0",
                "time": "1-00",
            },
            "generator": {
                "partition": "gpu-l40s",
                "gpus_per_node": 1,
                "gpu_type": "l40s",
                "cpus_per_task": 8,
                "mem": "60G",
            },
            "reward": {"partition": "cpu", "cpus_per_task": 32, "mem_per_cpu": "2G"},
        },
    },
    "gres_account_qos_constraint": {
        "resources": {
            role: {
                "account": "m1234",
                "qos": "regular",
                "constraint": "gpu&hbm80g" if role != "reward" else "cpu",
                "gpus_per_node": 4 if role != "reward" else 0,
                "gpu_request": "gres",
                "time": "00:30:00",
                "options": {"exclusive": "", "gres-flags": "enforce-binding"},
            }
            for role in ("trainer", "generator", "reward")
        },
    },
    "gpus_per_task_and_setup": {
        "launch": {
            "setup": ["module purge", "module load cray-mpich", "export FI_CXI_ATS=0"],
            "signal_delay_s": 600,
        },
        "generator": {"replicas": 2},
        "resources": {
            "trainer": {
                "ntasks_per_node": 8,
                "gpus_per_node": 8,
                "gpu_request": "gpus_per_task",
                "cpus_per_task": 7,
                "mem_per_gpu": "60G",
            },
            "generator": {"gpus_per_node": 1, "gpu_request": "gpus_per_task", "mem_per_gpu": "60G"},
            "reward": {"mem": "20G"},
        },
    },
    "no_resources_named": {},
    "one_partition": {
        "resources": {
            "job": {
                "partition": "all",
                "nodes": 2,
                "ntasks_per_node": 4,
                "gpus_per_node": 4,
                "mem": "100G",
                "time": "2-12:30",
            },
            "trainer": {"gpus_per_node": 4},
            "generator": {"gpus_per_node": 2},
        },
    },
    "job_name_and_mail": {
        "name": "50% of: lr=1e-6 beta='0.1'",
        "resources": {
            "trainer": {"options": {"mail-type": "END,FAIL", "mail_user": "me@site.example"}}
        },
    },
    "multi_node_replicas": {
        "generator": {"replicas": 2},
        "resources": {
            "trainer": {"nodes": 8, "gpus_per_node": 8, "ntasks_per_node": 8},
            "generator": {"nodes": 2, "gpus_per_node": 8, "ntasks_per_node": 8},
            "reward": {"options": {"exclude": "node[07-09]", "comment": 'say "hi" #1'}},
        },
        "rollout": {"prompts_per_step": 64},
    },
}


def config(**blocks: Any) -> Config:
    return Config.model_validate({"data": {"tasks": [{"name": "chain_sum"}]}, **blocks})


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "bin", monkeypatch)
    fake.answer("sbatch", (0, "700\n", ""))
    fake.answer("sacct", (1, "", "Slurm accounting storage is disabled"))
    fake.answer("squeue", (0, "700+0|PENDING||Resources\n", ""))
    return fake


# ------------------------------------------------------------------ scripts


@pytest.mark.parametrize("shape", SHAPES)
def test_a_script_is_what_was_recorded(shape: str) -> None:
    text = run_script(config(**SHAPES[shape]), Path("/scratch/me/runs/r 1"))
    text = text.replace(sys.executable, "/env/bin/python")
    path = GOLDEN / f"{shape}.sbatch"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("shape", SHAPES)
def test_bash_can_read_every_script(shape: str) -> None:
    path = GOLDEN / f"{shape}.sbatch"
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("file", "overrides"),
    [("sbatch/train_het.sbatch", []), ("sbatch/train_homogeneous.sbatch", HOMOGENEOUS)],
)
def test_the_scripts_for_use_by_hand_are_what_submit_writes(
    file: str, overrides: list[str]
) -> None:
    settings = load_config(ROOT / "experiments" / "slurm.yaml", overrides)
    text = script_by_hand(settings, file)
    if os.environ.get("UPDATE_GOLDEN"):
        (ROOT / file).write_text(text)
    assert text == (ROOT / file).read_text()
    submitted = run_script(settings, Path("/r"))

    def options(script: str) -> list[str]:
        names = ("--output", "--error")
        return [
            line
            for line in script.splitlines()
            if line.startswith("#SBATCH") and not line.split()[1].startswith(names)
        ]

    assert options(text) == options(submitted)


def test_a_script_by_hand_starts_a_run_and_then_continues_it(tmp_path: Path) -> None:
    program = tmp_path / "llamarl-hpc"
    program.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    program.chmod(0o755)
    script = tmp_path / "job.sh"
    script.write_text(script_by_hand(config(), "job.sh"))

    def say(*arguments: str) -> str:
        return subprocess.run(
            ["bash", script, *arguments],
            capture_output=True,
            text=True,
            env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
            check=False,
        ).stdout

    folder = tmp_path / "my run"
    assert say("c d.yaml", str(folder)) == f"run|c d.yaml|--run-dir|{folder}|--plain|--requeue|"
    folder.mkdir()
    (folder / "config.yaml").touch()
    assert say("c d.yaml", str(folder)) == f"resume|{folder}|--plain|--requeue|"
    assert say("c.yaml") == ""


def test_dry_run_prints_script_and_config_and_makes_nothing(tmp_path: Path) -> None:
    file = write_run_files(tmp_path)
    answer = cli("submit", file, "--dry-run", "--run-dir", tmp_path / "r", "--set", "name=abc")
    assert answer.code == 0, answer.err
    script, _, resolved = answer.out.partition("# ---- config.yaml ----\n")
    assert script.startswith("#!/bin/bash\n") and "#SBATCH --job-name=abc\n" in script
    (tmp_path / "again.yaml").write_text(resolved)
    assert load_config(tmp_path / "again.yaml") == load_config(file, ["name=abc"])
    assert not (tmp_path / "r").exists()


def test_script_writes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.sbatch"
    answer = cli("submit", ROOT / "experiments" / "slurm.yaml", "--script", path)
    assert answer.code == 0 and path.read_text().count("#SBATCH hetjob") == 2


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, contextlib\n"
        "from llamarl_hpc.cli.main import app\n"
        "with contextlib.suppress(SystemExit): app(['submit', '--help'])\n"
        "print(sorted({'torch', 'submitit', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--set", "launch.launcher=mpiexec"], "launch.launcher is mpiexec"),
        (["--set", "resources.trainer.mem=1G"], "name no memory"),
        (["--set", "resources.trainer.time=4h"], "'4h' is not a time limit"),
        (["--run-dir", "x/100%j"], "percent sign"),
        (["--run-dir", "x/back\\slash"], "backslash"),
    ],
)
def test_what_cannot_be_submitted_is_one_sentence(
    slurm: FakeSlurm, tmp_path: Path, changes: list[str], message: str
) -> None:
    answer = cli("submit", write_run_files(tmp_path), *changes)
    assert answer.code == 2 and message in answer.err and len(answer.err.splitlines()) == 1
    assert not (tmp_path / "x").exists()


def test_without_slurm_it_says_so(tmp_path: Path) -> None:
    answer = cli("submit", write_run_files(tmp_path), "--run-dir", tmp_path / "r", PATH="/nowhere")
    assert answer.code == 2 and "no sbatch and no srun on PATH" in answer.err
    assert not (tmp_path / "r").exists()


def test_a_checkpoint_that_takes_longer_than_slurm_gives_is_refused(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    config = write_run_files(tmp_path, launch={"signal_delay_s": 1})
    weights = {"a": {"dtype": "BF16", "shape": [1 << 33], "data_offsets": [0, 1 << 34]}}
    header = json.dumps(weights).encode()
    with (tmp_path / "model" / "model.safetensors").open("wb") as file:  # 16 GiB, all holes
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(file.tell() + (1 << 34))
    answer = cli("submit", config, "--run-dir", tmp_path / "r")
    assert answer.code == 2 and len(answer.err.splitlines()) == 1, answer.err
    assert "a checkpoint of 96.0 GiB would take" in answer.err
    assert "launch.signal_delay_s lets Slurm signal only 1 s before the job's end" in answer.err
    assert not (tmp_path / "r").exists() and slurm.calls("sbatch") == []


def test_a_job_that_sbatch_refuses_leaves_no_run_behind(slurm: FakeSlurm, tmp_path: Path) -> None:
    config, logs = write_run_files(tmp_path), tmp_path / "logs"
    logs.mkdir()
    (logs / "mine.out").write_text("kept")
    slurm.answer("sbatch", (1, "", "sbatch: error: Requested node configuration is not available"))
    for folder in (tmp_path / "r", logs):
        answer = cli("submit", config, "--run-dir", folder)
        assert answer.code == 2 and "configuration is not available" in answer.err
    assert not (tmp_path / "r").exists() and (logs / "mine.out").read_text() == "kept"
    slurm.answer("sbatch", (0, "700\n", ""))
    for folder in (tmp_path / "r", logs):
        assert cli("submit", config, "--run-dir", folder).code == 0


# ------------------------------------------------------------------ submitting


def test_submit_makes_the_run_folder_and_continues_it_the_next_time(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    folder = tmp_path / "r"
    answer = cli("submit", write_run_files(tmp_path), "--run-dir", folder)
    assert answer.code == 0, answer.err
    assert "job 700: trainer, generator (1 replica), reward" in answer.out
    script = (folder / "slurm" / "700_submission.sh").read_text()
    assert script == run_script(load_config(folder / "config.yaml"), folder)
    slurm.answer("sbatch", (0, "701\n", ""))
    early = cli("submit", folder, "--set", "trainer.max_steps=9")
    assert early.code == 2 and "job 700 of this run is PENDING" in early.err
    slurm.answer("squeue", (0, "700+0|CANCELLED||None\n", ""))
    again = cli("submit", folder, "--set", "trainer.max_steps=9")
    assert again.code == 0, again.err
    last = (folder / "slurm" / "701_submission.sh").read_text().splitlines()[-1]
    assert last.endswith("--plain --requeue --set trainer.max_steps=9")
    info = json.loads((folder / "run.json").read_text())
    assert [job["id"] for job in info["jobs"]] == ["700", "701"]
    fixed = cli("submit", folder, "--set", "rollout.seed=9")
    assert fixed.code == 2 and "cannot change" in fixed.err


def test_the_executor_and_the_dry_run_write_the_same_script(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    settings = config(**SHAPES["gpus_per_node_typed"])
    run = RunDir.create_at(tmp_path / "r")
    executor = HetSlurmExecutor(
        run.path / "slurm",
        components_of(settings),
        job={"job-name": "run", "no-kill": None},
        requeue=True,
    )
    command = run_script(settings, run.path).splitlines()[-1].removeprefix("exec ")

    def without_comments(text: str) -> list[str]:
        return [line for line in text.splitlines() if not line.startswith("# ")]

    assert without_comments(executor.script(command)) == without_comments(
        run_script(settings, run.path)
    )


def attempt(outcome: str, **more: Any) -> dict[str, Any]:
    return {"number": 1, "job_id": "700", "outcome": outcome, "reason": "", "exit_code": 0, **more}


@pytest.mark.parametrize(
    ("entry", "code", "words"),
    [
        (attempt("done"), 0, "job 700: COMPLETED"),
        (attempt("failed", reason="trainer rank 0 died", exit_code=3), 3, "trainer rank 0 died"),
        (attempt("stopped", reason="stopped by SIGUSR2", exit_code=4), 4, "stopped by SIGUSR2"),
        (attempt("done", job_id="699"), 1, "the run does not say how"),  # an older job's
    ],
)
def test_wait_ends_with_the_runs_own_exit_code(
    slurm: FakeSlurm, tmp_path: Path, entry: dict[str, Any], code: int, words: str
) -> None:
    folder = tmp_path / "r"
    assert cli("submit", write_run_files(tmp_path), "--run-dir", folder).code == 0
    # the controller of the second job is this stub: sbatch writes what it would have left
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(info | {"attempts": [entry]}))
    state = "COMPLETED" if entry["job_id"] == "700" and code == 0 else "FAILED"
    slurm.answer("squeue", (0, f"700+0|{state}|n1|None\n700+1|COMPLETED|n1|None\n", ""))
    answer = cli("submit", folder, "--wait", "--set", "trainer.max_steps=9")
    assert answer.code == code, answer.err
    assert words in answer.out + answer.err
    assert ("llamarl-hpc logs" in answer.err) is (code != 0)
    assert "job.stderr" not in answer.err  # advice of submitit, for those who hold its object
