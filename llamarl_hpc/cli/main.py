"""The console script `llamarl-hpc`: collects the commands and turns errors into exit codes.

Nothing heavy is imported here: every command imports what it needs when it is called, so that
`--help` and `status` answer at once on a login node.
"""

from __future__ import annotations

import sys

import typer

from llamarl_hpc.cli import bench, evaluate, export, report, rollouts, run, status
from llamarl_hpc.errors import ConfigError, LlamarlError, StoppedBySignal

app = typer.Typer(
    name="llamarl-hpc",
    help="Asynchronous RL post-training of LLMs with Slurm, MPI, PyTorch, DeepSpeed and HDF5.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for module in (run, status, rollouts, report, evaluate, export, bench):
    module.register(app)


def main() -> None:
    """Exit codes: 0 done, 2 user error, 3 an executor failed, 4 stopped and resumable."""
    try:
        app()
    except LlamarlError as error:
        kind = "" if isinstance(error, StoppedBySignal) else "error: "
        text = str(error) if not isinstance(error, ConfigError) else " ".join(str(error).split())
        sys.stderr.write(f"{kind}{text}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
