"""What asynchrony gains on this machine: the same config with max_staleness 0 and 1, in turn.

    python experiments/benchmarks/overlap.py [CONFIG] [--steps 10] [--repeats 1] [--json FILE]

Both kinds of run alternate, so that a machine that grows slower or faster hurts neither. Speed-up
is the ratio of seconds per step; its bound is (t_gen + t_train) / max(t_gen, t_train) with the
times that generation and training took when they did not disturb each other, from the spans of
the synchronous runs. The first two steps of a run (warm-up) do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from analysis.read_run import Run
from analysis.timeline import step_times

WARM_UP = 2


def main() -> None:
    arguments = _parse()
    times: dict[int, list[tuple[float, ...]]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory(prefix="overlap-") as folder:
        for repeat in range(arguments.repeats):
            for staleness in (0, 1):
                run = Path(folder) / f"{staleness}-{repeat}"
                _run(arguments, staleness, run)
                times[staleness] += step_times(Run.open(run).spans(1))[WARM_UP - 1 :]
    figures = compare(times) | {"load_1min": os.getloadavg()[0], "cores": os.cpu_count()}
    for name, value in figures.items():
        sys.stdout.write(f"{name:24} {value:.3f}\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


def compare(times: dict[int, list[tuple[float, ...]]]) -> dict[str, Any]:
    """Medians of (step, generation, training) seconds by max_staleness; speed-up and its bound."""
    step, t_gen, t_train = (
        {s: statistics.median(row[k] for row in rows) for s, rows in times.items()}
        for k in range(3)
    )
    bound = (t_gen[0] + t_train[0]) / max(t_gen[0], t_train[0])
    return {
        "step_s_staleness_0": step[0],
        "step_s_staleness_1": step[1],
        "t_gen_s_alone": t_gen[0],
        "t_train_s_alone": t_train[0],
        "t_gen_s_overlapped": t_gen[1],
        "t_train_s_overlapped": t_train[1],
        "speed_up": step[0] / step[1],
        "bound": bound,
        "share_of_bound": step[0] / step[1] / bound,
    }


def _run(arguments: argparse.Namespace, staleness: int, folder: Path) -> None:
    changes = {
        "algorithm.max_staleness": staleness,
        "trainer.max_steps": arguments.steps + WARM_UP,
        "trainer.save_steps": 0,
        "trainer.eval_steps": 0,
        "evaluation.num_prompts": 0,
    }
    settings = [f"--set={key}={value}" for key, value in changes.items()]
    command = [sys.executable, "-m", "llamarl_hpc.cli.main", "run", str(arguments.config)]
    subprocess.run([*command, "--plain", f"--run-dir={folder}", *settings], check=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    default = Path(__file__).parents[1] / "quickstart.yaml"
    parser.add_argument("config", nargs="?", type=Path, default=default)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
