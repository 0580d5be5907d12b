"""States that only a real sacct knows: of heterogeneous jobs, and of those that were requeued."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from accounting import Accounting, wait_for
from cluster import Cluster

from llamarl_hpc.launch import queue
from llamarl_hpc.manage.find import find_run

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(Accounting.missing()), reason=f"not installed: {', '.join(Accounting.missing())}"
    ),
]

HET = """#!/bin/bash
#SBATCH --partition=trainer --mem=100M --requeue
#SBATCH hetjob
#SBATCH --partition=reward --mem=100M
"""


@pytest.fixture(scope="module")
def accounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cluster with accounting; a folder with a squeue and a scontrol that know no job."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    made = Cluster(folder, accounting=Accounting(folder))
    bin_folder = tmp_path_factory.mktemp("bin")
    for name in ("squeue", "scontrol"):
        (bin_folder / name).write_text("#!/bin/sh\necho Invalid job id specified >&2\nexit 1\n")
        (bin_folder / name).chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(made.conf))
        try:
            made.start()
            yield bin_folder
        finally:
            made.stop()
            shutil.rmtree(folder, ignore_errors=True)


def sbatch(script: Path, text: str) -> str:
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(text)
    answer = subprocess.run(
        ["sbatch", "--parsable", script],
        cwd=script.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    return answer.stdout.strip()


def test_sacct_alone_tells_how_jobs_ended_and_where_their_runs_are(
    accounted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "it's a run"
    done = sbatch(run / "slurm" / ".submission_file_1.sh", HET + "exit 0\n")
    requeued = sbatch(tmp_path / "again.sh", HET + "sleep 100\n")
    (run / "config.yaml").touch()

    def squeue(job: str) -> str:
        report = queue.ask([job], since=time.time() - 60.0)
        return report.views[job].state if job in report.views else ""

    wait_for(60.0, "running job", lambda: squeue(requeued) == "RUNNING")
    subprocess.run(["scontrol", "requeue", requeued], check=True)
    wait_for(60.0, "requeued job", lambda: squeue(requeued) == "PENDING")
    subprocess.run(["scancel", requeued], check=True)
    wait_for(60.0, "ended job", lambda: squeue(done) == "COMPLETED")
    monkeypatch.setenv("PATH", f"{accounted}:{os.environ['PATH']}")

    def accounting() -> dict[str, dict[int, str]]:
        report = queue.ask([done, requeued], since=time.time() - 3600.0)
        assert report.gone == {done, requeued} and report.failures == []
        return {job: view.states for job, view in report.views.items()}

    wanted = {
        done: {0: "COMPLETED", 1: "COMPLETED"},
        requeued: {0: "CANCELLED", 1: "CANCELLED"},  # and not what it was before the requeue
    }
    wait_for(60.0, "word of accounting", lambda: accounting() == wanted)
    wait_for(60.0, "script in accounting", lambda: _run_of(done) == run)


def _run_of(job: str) -> Path | None:
    try:
        return find_run(job).path
    except ValueError:
        return None
