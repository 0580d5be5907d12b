"""A rank's look around, and how long it waits for others."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from llamarl_hpc.launch.doctor import probe
from llamarl_hpc.launch.doctor.probe import Spec, look_around


def spec(folder: Path, **changes: Any) -> Spec:
    values: dict[str, Any] = {
        "role": "generator",
        "folder": str(folder),
        "token": "t",
        "controller": ("127.0.0.1", 1),
        "roles": ["generator", "reward", "trainer"],
        "interface": None,
        "files": [],
        "gpus": 0,
        "patience_s": 0.2,
        "meet_s": 60.0,
    }
    return Spec(**values | changes)


def test_a_rank_says_what_it_may_use_and_what_it_misses(tmp_path: Path) -> None:
    here = tmp_path / "config.json"
    here.touch()
    report = look_around(spec(tmp_path, files=[str(here), "/nowhere/x.json"]), rank=3)
    assert (report.rank, report.pid) == (3, os.getpid())
    assert report.affinity == sorted(os.sched_getaffinity(0))
    assert report.missing_files == ["/nowhere/x.json"]
    assert report.versions["mpi4py"] and report.open_files != 0
    assert not report.is_final and report.gpus == []


def test_without_the_drivers_program_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert probe.find_gpus() == ([], "neither nvidia-smi nor rocm-smi is there")


def test_gpus_are_what_the_driver_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 570.86'\necho 'NVIDIA H200, 570.86'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert probe.find_gpus() == (["NVIDIA H200, 570.86"] * 2, "")
    program.write_text("#!/bin/sh\necho 'no devices were found'; exit 6\n")
    assert probe.find_gpus() == ([], "no devices were found")


def test_a_role_whose_step_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    start = time.monotonic()
    (tmp_path / probe.gone("trainer")).touch()
    assert probe._hello_of("trainer", spec(tmp_path), start + 60.0) is None
    (tmp_path / "trainer.hello.json").write_text('{"address": "10.0.0.1", "port": 5}')
    assert probe._hello_of("trainer", spec(tmp_path), start + 60.0) == ("10.0.0.1", 5)
    assert time.monotonic() - start < 30.0


def test_a_folder_that_is_not_shared_is_given_up_on(tmp_path: Path) -> None:
    assert probe._pulse_age(spec(tmp_path)) is None
    (tmp_path / probe.PULSE).write_text(f'{{"token": "another", "time": {time.time()}}}')
    assert probe._pulse_age(spec(tmp_path)) is None
    (tmp_path / probe.PULSE).write_text(f'{{"token": "t", "time": {time.time() - 2.0}}}')
    age = probe._pulse_age(spec(tmp_path, patience_s=30.0))
    assert age is not None and 2.0 <= age < 30.0
