"""What one key does to weight sync in a real run: the same config with each of its values, in turn.

    python experiments/benchmarks/weight_sync_in_a_run.py KEY VALUE VALUE [--set KEY=VALUE ...]
        [--config CONFIG] [--steps 6] [--json FILE]

For each value, medians over the steps: seconds of a sync, those for which the trainer was kept, MiB
of a version and the share of it that was sent, mismatch of generator and trainer. In a pause a
replica copies a version that has arrived; it decodes before and after. The first step (warm-up)
does not count. Losses are those of all steps: values that change no arithmetic have equal ones
where no time decides what is trained on, which is with `algorithm.max_staleness=0`.
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

METRICS = {
    "sync_s": "time/weight_sync",
    "stall_s": "time/weight_sync_blocking",
    "version_mib": "weight_sync/mib",
    "sent_share": "weight_sync/sent_share",
    "step_s": "time/step",
    "mismatch_kl": "mismatch/kl",
    "logprob_abs_diff": "mismatch/logprob_abs_diff",
    "ess": "ess",
}


def main() -> None:
    arguments = _parse()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="weight-sync-") as folder:
        for value in arguments.values:
            run, before = Path(folder) / value, os.getloadavg()[0]
            _run(arguments, value, run)
            found = measured(Run.open(run)) | {"load_1min": [before, os.getloadavg()[0]]}
            figures[value] = found
            sys.stdout.write(f"{arguments.key}={value}\n")
            for name, figure in found.items():
                sys.stdout.write(f"    {name:20} {_shown(figure)}\n")
            sys.stdout.flush()
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


def measured(run: Run) -> dict[str, Any]:
    """Medians over the steps but the first; losses and mean rewards of all steps."""
    rows = run.metric_rows()
    # version 1 goes whole, into memory that was never used
    spans = [s for s in run.spans(1) if s.name == "load_weights" and s.args.get("version", 0) > 1]
    pauses = [span.duration_s for span in spans]
    found: dict[str, Any] = {
        name: statistics.median(row[metric] for row in rows[1:]) for name, metric in METRICS.items()
    }
    return found | {
        "pause_s": statistics.median(pauses),
        "pause_max_s": max(pauses),
        "pauses": len(pauses),
        "losses": [row["loss"] for row in rows],
        "rewards": [row["reward/mean"] for row in rows],
    }


def _shown(figure: Any) -> str:
    if isinstance(figure, list):
        return " ".join(_shown(one) for one in figure)
    return f"{figure:.4g}"


def _run(arguments: argparse.Namespace, value: str, folder: Path) -> None:
    changes = [
        f"trainer.max_steps={arguments.steps + 1}",
        "trainer.save_steps=0",
        "trainer.eval_steps=0",
        "evaluation.num_prompts=0",
        *arguments.set,
        f"{arguments.key}={value}",
    ]
    settings = [f"--set={change}" for change in changes]
    command = [sys.executable, "-m", "llamarl_hpc.cli.main", "run", str(arguments.config)]
    subprocess.run([*command, "--plain", f"--run-dir={folder}", *settings], check=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    default = Path(__file__).parents[1] / "quickstart.yaml"
    parser.add_argument("key")
    parser.add_argument("values", nargs="+")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--config", type=Path, default=default)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
