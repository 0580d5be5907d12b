"""What `sbatch --parsable` answers: `123` or `123;cluster`, perhaps below a site's banner."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llamarl_hpc.errors import ConfigError

_ID_LINE = re.compile(r"(?P<job>\d+)(?:;(?P<cluster>\S+))?")


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """A job that Slurm has taken."""

    job: str  # of a heterogeneous job: the leader's
    cluster: str = ""  # to be named in later commands (-M); empty: this one


def parse_submission(stdout: str, stderr: str, returncode: int) -> Submitted:
    """The last line that is nothing but an id. Raises ConfigError with what sbatch said."""
    if returncode == 0:
        for line in reversed(stdout.splitlines()):
            if match := _ID_LINE.fullmatch(line.strip()):
                return Submitted(job=match["job"], cluster=match["cluster"] or "")
    said = " ".join((stderr.strip() or stdout.strip() or "nothing").split())
    if returncode:
        raise ConfigError(f"sbatch refused the job (exit code {returncode}): {said}")
    raise ConfigError(f"sbatch gave no job id; it said: {said}")
