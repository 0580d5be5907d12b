"""Whether mpiexec or srun takes the arguments of `launch.extra_args`, asked before anything starts.

Both read their options first, so in front of `--version` a wrong one is named at once. Whether an
argument does any good only a step can show.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.launch.allocation import outside_allocation

_TIMEOUT_S = 60.0
_SPEAKER = re.compile(r"^(\[[^\]]*\] \S+ \([^)]*\): |\S*(srun|mpiexec|mpirun): (error: )?)")


def check_extra_args(arguments: Sequence[str], program: str) -> None:
    """Raise ConfigError when `program`, an mpiexec or an srun, refuses them."""
    if not arguments:
        return
    # a word that is no option would be taken for the command: srun is not to start it
    lead = ["--test-only"] if Path(program).name == "srun" else []
    try:
        done = subprocess.run(
            [program, *lead, *arguments, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            env=outside_allocation(os.environ),
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{program} does not run: {error}; load Slurm's or MPI's module") from (
            error
        )
    if done.returncode == 0 and (not lead or done.stdout.startswith("slurm")):
        return
    said = next((line for line in done.stderr.splitlines() if line.strip()), "")
    reason = _SPEAKER.sub("", said) if done.returncode else "a word of them is no option"
    raise ConfigError(
        f"launch.extra_args {list(arguments)} are not for {program}: "
        f"{reason or 'it ends without a word'}; see '{Path(program).name} --help'"
    )
