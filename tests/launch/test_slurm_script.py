"""The text of batch scripts: quoting, names, order of blocks."""

from __future__ import annotations

import pytest

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.launch.script import BatchScript, Component, job_name, log_file, render


def read_value(text: str) -> str:
    """A value of an #SBATCH line as Slurm reads it: quotes off, backslash keeps the next one."""
    out, quoted, characters = "", False, iter(text)
    for c in characters:
        if c == "\\":
            out += next(characters)
        elif c == '"':
            quoted = not quoted
        elif c in " #" and not quoted:
            break
        else:
            out += c
    return out


def read_pattern(text: str, job_id: str) -> str:
    return text.replace("%%", "\0").replace("%j", job_id).replace("\0", "%")


@pytest.mark.parametrize(
    "folder", ['run a=1 b="x"', "it's", "100%", "\u00fcn\u00ef", "a#b $HOME `id` *", "tab\there"]
)
def test_a_log_lands_in_exactly_the_folder_that_was_meant(folder: str) -> None:
    output = log_file(f"/runs/{folder}/%j.out")
    text = render(BatchScript(job={"output": output}, components=[], command="true"))
    (line,) = (line for line in text.splitlines() if line.startswith("#SBATCH"))
    value = read_value(line.removeprefix("#SBATCH --output="))
    assert read_pattern(value, "42") == f"/runs/{folder}/42.out"


def test_what_slurm_cannot_be_given_is_refused() -> None:
    with pytest.raises(ConfigError, match="backslash"):
        log_file("/runs/back\\slash/%j.out")
    with pytest.raises(ConfigError, match="several lines"):
        render(BatchScript(job={"comment": "two\nlines"}, components=[], command="true"))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a/b", "a-b"),
        ("50% run", "50-run"),
        ("two\nlines", "two-lines"),
        ("x" * 300, "x" * 64),
        ("///", "run"),
    ],
)
def test_job_names_are_cleaned(text: str, name: str) -> None:
    assert job_name(text) == name


def test_options_of_the_job_come_first_and_components_are_told_apart() -> None:
    script = BatchScript(
        job={"job-name": "x", "no-requeue": None},
        components=[
            Component(name="trainer", options={"nodes": 2}),
            Component(name="two\nlines", options={"constraint": "a100|h100"}),
        ],
        setup=["module load mpi"],
        environment={"A": "b c"},
        command="python -m x",
        comment=["A comment."],
    )
    assert render(script) == (
        "#!/bin/bash\n"
        "# A comment.\n"
        "#SBATCH --job-name=x\n"
        "#SBATCH --no-requeue\n"
        "#\n"
        "# component 0: trainer\n"
        "#SBATCH --nodes=2\n"
        "#\n"
        "#SBATCH hetjob\n"
        "# component 1: two lines\n"
        "#SBATCH --constraint=a100|h100\n"
        "\n"
        "module load mpi\n"
        "export A='b c'\n"
        "exec python -m x\n"
    )
