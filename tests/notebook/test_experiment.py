"""A configuration from Python: changes, what is shown, the script, and errors of one sentence."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_run import cli, write_run_files

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.notebook import Experiment
from llamarl_hpc.notebook.changes import as_overrides

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "experiments" / "quickstart.yaml"
SLURM = ROOT / "experiments" / "slurm.yaml"

# ------------------------------------------------------------------ changes


@pytest.mark.parametrize(
    ("changes", "overrides"),
    [
        (None, []),
        ({"trainer.max_steps": 10}, ["trainer.max_steps=10"]),
        ({"trainer": {"max_steps": 10, "dtype": "bf16"}, "name": "x"}, None),
        (["trainer.max_steps=10"], ["trainer.max_steps=10"]),
        ({"trainer.learning_rate": np.float64(0.5)}, ["trainer.learning_rate=0.5"]),
        ({"data.path": Path("/a b/c")}, ['data.path="/a b/c"']),
        ({"data.eval_path": None, "weight_sync.verify": True}, None),
        ({"launch.setup": ["module load x"]}, ['launch.setup=["module load x"]']),
    ],
)
def test_changes_become_overrides(changes: Any, overrides: list[str] | None) -> None:
    found = as_overrides(changes)
    assert overrides is None or found == overrides
    assert as_overrides(found) == found


@pytest.mark.parametrize(
    ("changes", "place", "value"),
    [
        ({"trainer.learning_rate": 1e-6}, "trainer.learning_rate", 1e-6),
        ({"resources.trainer.mem": "0"}, "resources.trainer.mem", "0"),
        ({"resources": {"trainer": {"time": "04:00:00"}}}, "resources.trainer.time", "04:00:00"),
        ({"name": "yes: [a] # \N{GREEK SMALL LETTER ALPHA}"}, "name", None),
        ({"data.prompt_format": 'say "{prompt}"\n'}, "data.prompt_format", 'say "{prompt}"\n'),
        ({"data.eval_path": None}, "data.eval_path", None),
    ],
)
def test_values_arrive_as_they_are(changes: Any, place: str, value: Any) -> None:
    found: Any = Experiment.load(SLURM, changes).config
    for name in place.split("."):
        found = getattr(found, name)
    assert found == (value if place != "name" else changes["name"])


@pytest.mark.parametrize("changes", ["trainer.max_steps=1", [1], {"name": object()}, {3: 4}])
def test_what_cannot_be_a_change_is_refused(changes: Any) -> None:
    with pytest.raises(ConfigError):
        as_overrides(changes)


def test_changes_add_up_and_leave_the_first_experiment_alone() -> None:
    first = Experiment.load(QUICKSTART, {"trainer.max_steps": 10}, generator={"replicas": 3})
    second = first.with_({"trainer.max_steps": 5}, name="other")
    assert (first.config.trainer.max_steps, second.config.trainer.max_steps) == (10, 5)
    assert (second.config.name, second.config.generator.replicas) == ("other", 3)
    assert repr(second).startswith("Experiment(other: ") and "max_steps=5" in repr(second)


# ------------------------------------------------------------------ what is shown


def test_a_cell_shows_what_matters_and_every_key() -> None:
    html = Experiment.load(QUICKSTART, {"name": "<b>"})._repr_html_()
    assert "&lt;b&gt;" in html and "<b>" not in html
    assert "16 prompts x 8 completions of at most 10 tokens" in html
    assert "basic_arithmetic" in html and "prompts_per_step: 16" in html


def test_the_script_is_the_one_of_the_command_line(tmp_path: Path) -> None:
    script = Experiment.load(SLURM, {"trainer.max_steps": 7}).script(tmp_path / "run")
    answer = cli(
        *("submit", SLURM, "--set", "trainer.max_steps=7"),
        *("--run-dir", tmp_path / "run", "--dry-run"),
    )
    assert answer.code == 0, answer.err
    assert answer.out.startswith(script)
    assert repr(script) == script and script._repr_html_().startswith("<pre")
    assert not (tmp_path / "run").exists()


def test_check_says_what_was_found(tmp_path: Path) -> None:
    found = Experiment.load(write_run_files(tmp_path)).check()
    assert f"model: {tmp_path / 'model'}" in found
    assert "56 training prompts (56 distinct), 8 held-out prompts" in found


# ------------------------------------------------------------------ mistakes


def test_mistakes_are_one_sentence_also_in_ipython() -> None:
    with pytest.raises(ConfigError, match=r"max_step.*did you mean") as caught:
        Experiment.load(QUICKSTART, {"trainer.max_step": 10})
    assert caught.value._render_traceback_() == [f"ConfigError: {caught.value}"]


def test_submitting_without_slurm_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no sbatch and no srun on PATH"):
        Experiment.load(SLURM).submit(tmp_path / "run")
    assert not (tmp_path / "run").exists()


async def test_a_running_event_loop_is_left_alone(tmp_path: Path) -> None:
    """Jupyter's kernel runs one in the thread of its cells."""
    assert asyncio.get_running_loop().is_running()
    experiment = Experiment.load(write_run_files(tmp_path))
    assert experiment.check()
    with pytest.raises(ConfigError, match=r"resources\.trainer\.nodes is 2"):
        experiment.with_({"resources.trainer.nodes": 2}).start(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_nothing_heavy_is_imported() -> None:
    code = "import json, sys, llamarl_hpc.notebook; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    heavy = {"torch", "transformers", "deepspeed", "mpi4py", "h5py", "zmq", "submitit"}
    heavy |= {"pandas", "matplotlib", "IPython", "jinja2"}
    assert heavy & set(json.loads(done.stdout)) == set()
