"""Arguments that the launcher refuses are named before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm

from llamarl_hpc.config.schema import Config
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.launch.extra_args import check_extra_args
from llamarl_hpc.launch.starter import find_starter

VERSION = "slurm-wlm 22.05.8\n"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "bin", monkeypatch)


def test_no_arguments_are_no_question(slurm: FakeSlurm) -> None:
    check_extra_args([], "srun")
    assert slurm.calls("srun") == []


def test_srun_is_asked_outside_of_a_job_and_starts_nothing(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "700")
    slurm.answer("srun", (0, VERSION, ""))
    check_extra_args(["--label"], "srun")
    (call,) = slurm.calls("srun")
    assert call["argv"] == ["--test-only", "--label", "--version"]
    assert "SLURM_JOB_ID" not in call["env"]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((255, "", "srun: unrecognized option '--foo'\nTry"), ": unrecognized option '--foo'; see"),
        ((255, "", "srun: error: Invalid --mem specification\n"), ": Invalid --mem specification;"),
        ((0, "", "srun: Job 2 to start at 2026-12-01T08:11:33"), ": a word of them is no option;"),
        ((1, "", ""), ": it ends without a word; see 'srun --help'"),
    ],
)
def test_what_srun_refuses_is_one_sentence(
    slurm: FakeSlurm, answer: tuple[int, str, str], said: str
) -> None:
    slurm.answer("srun", answer)
    with pytest.raises(
        ConfigError, match=r"^launch.extra_args \['-x'\] are not for srun: "
    ) as found:
        check_extra_args(["-x"], "srun")
    assert said in str(found.value)


@pytest.mark.mpi
def test_mpiexec_names_what_it_does_not_know() -> None:
    def settings(*arguments: str) -> Config:
        values: dict[str, Any] = {"launch": {"extra_args": list(arguments)}}
        return Config.model_validate(values)

    find_starter(settings("-v"), {})
    with pytest.raises(ConfigError, match=r"\['--no-such-thing'\] are not for \S*mpiexec: \S+ "):
        find_starter(settings("--no-such-thing"), {})
