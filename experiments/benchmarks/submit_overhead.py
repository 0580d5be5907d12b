"""What a run costs before its executors work: `submit` against plain submitit of an empty function.

    python experiments/benchmarks/submit_overhead.py [--repeats 3] [--json FILE]

Seconds from the return of the submission to the first line in a log: of the first executor's rank
here, of the function there. Between the two lie the start of the controller, what it checks and
loads, and the start of a job step. Both kinds of job alternate. On a machine with Slurm's programs
but no cluster (SLURM_CONF is not set, sinfo does not answer) a small one is started for the
measurement, as in the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import submitit

from llamarl_hpc.launch.queue import run_command
from llamarl_hpc.manage.cancel import cancel_run
from llamarl_hpc.run_dir import RunDir

TESTS = Path(__file__).parents[2] / "tests"
WAIT_S = 600.0
EXECUTORS = ("trainer", "generator.0", "reward")


def main() -> None:
    arguments = _parse()
    seconds: dict[str, list[float]] = {"run": [], "submitit": []}
    with _cluster(), tempfile.TemporaryDirectory(prefix="overhead-") as name:
        folder = Path(name)
        config = _config(folder, arguments.partition)
        for repeat in range(arguments.repeats):
            plain = _submitit(folder / f"plain-{repeat}", arguments.partition[0])
            seconds["submitit"].append(plain)
            seconds["run"].append(_run(config, folder / f"run-{repeat}"))
    figures: dict[str, Any] = {f"{k}_s": statistics.median(v) for k, v in seconds.items()}
    figures |= {f"{k}_max_s": max(v) for k, v in seconds.items()}
    figures |= {"ratio": figures["run_s"] / figures["submitit_s"]}
    figures |= {"load_1min": os.getloadavg()[0], "cores": os.cpu_count()}
    for key, value in figures.items():
        sys.stdout.write(f"{key:20} {value:.2f}\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


def _submitit(folder: Path, partition: str) -> float:
    executor = submitit.SlurmExecutor(folder)
    executor.update_parameters(partition=partition, time=5, mem="300M")
    job = executor.submit(_nothing)
    returned = time.monotonic()
    out = Path(str(job.paths.stdout))
    return _wait("line of submitit", lambda: out.exists() and out.stat().st_size > 0) - returned


def _nothing() -> None:
    return None


def _run(config: Path, folder: Path) -> float:
    command = [sys.executable, "-m", "llamarl_hpc.cli.main", "submit", config, "--run-dir", folder]
    subprocess.run(command, check=True, capture_output=True)
    returned = time.monotonic()
    run = RunDir(folder)
    logs = [run.log(1, executor, 0) for executor in EXECUTORS]
    line = _wait("line of an executor", lambda: any(p.exists() and p.stat().st_size for p in logs))
    cancel_run(run, now=True)
    return line - returned


def _wait(what: str, condition: Callable[[], object]) -> float:
    """The monotonic moment at which it holds."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} in {WAIT_S:.0f} s")
        time.sleep(0.02)
    return time.monotonic()


def _config(folder: Path, partitions: list[str]) -> Path:
    """A run of a tiny random model, a component on each of the three partitions."""
    sys.path.insert(0, str(TESTS))
    from tiny_run import write_run_files

    names = ("trainer", "generator", "reward")
    resources = {
        name: {"partition": partition, "mem": "700M", "time": "10"}
        for name, partition in zip(names, partitions, strict=True)
    }
    return write_run_files(folder, resources=resources, trainer={"max_steps": 100_000})


@contextmanager
def _cluster() -> Iterator[None]:
    if run_command(["sinfo", "--noheader"], timeout_s=10.0).returncode == 0:
        yield
        return
    sys.path.insert(0, str(TESTS / "slurm"))
    from cluster import Cluster

    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        made = Cluster(Path(folder))
        os.environ.update(made.environ())
        try:
            made.start()
            yield
        finally:
            made.stop()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--partition",
        nargs=3,
        default=["trainer", "generator", "reward"],
        help="of trainer, generator, reward",
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
