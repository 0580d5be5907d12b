"""A disk that fills up while a run goes on costs nothing that was complete."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_run import Start, attempts_of, cli, losses_of, write_run_files

from analysis.accounting import accounting
from analysis.read_run import Run

pytestmark = [pytest.mark.e2e, pytest.mark.mpi]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1.2 MB, which a checkpoint of the tiny model (1.1 MB) overfills."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError as error:
        pytest.skip(f"no mount command: {error}")
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], timeout=30, check=True)


def resize(disk: Path, size: str) -> None:
    command = ["mount", "-o", f"remount,size={size}", str(disk)]
    subprocess.run(command, timeout=30, check=True)


def test_a_full_disk_is_named_and_waited_out(
    start: Start, small_disk: Path, tmp_path: Path
) -> None:
    config, folder = write_run_files(tmp_path), small_disk / "run"
    run = start("run", config, "--run-dir", folder, folder=folder, logs=tmp_path)
    answer = run.finish()
    assert answer.code == 3
    error = answer.err[answer.err.index("error: ") :].splitlines()[0]
    assert error.startswith("error: trainer rank 0 on ")
    assert "the checkpoint could not be written to" in error
    assert re.search(r"where 1\.\d MiB are free for 1\.\d MiB", error)
    assert "Logging error" not in answer.err
    assert attempts_of(folder)[0]["outcome"] == "failed"
    assert list((folder / "checkpoints").iterdir()) == []
    books = accounting(Run.open(folder))
    # it was written beside the next steps, which may have been made before it failed
    assert books.violations == [] and books.counts["trained"] in (8, 12, 16)

    resize(small_disk, "20m")
    slow, filler = tmp_path / "slow", small_disk / "filler"
    slow.touch()
    run = start("resume", folder, "--set", "trainer.save_steps=0", folder=folder, logs=tmp_path)
    run.wait_for_step(2)
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            os.fsync(file.fileno())
    run.wait_for_text("training waits: rollouts cannot be written")
    assert f"waits for space on {folder}" in cli("status", folder).out
    filler.unlink()
    slow.unlink()
    answer = run.finish()
    assert answer.code == 0 and answer.err == "", answer.err
    books = accounting(Run.open(folder))
    assert books.violations == [] and books.counts == {"trained": 24}
    assert len(losses_of(folder)) == 6
