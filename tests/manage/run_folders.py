"""What Slurm's commands answer, and what a controller writes of an attempt."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from llamarl_hpc.run_dir import RunDir

NO_ACCOUNTING = (1, "", "Slurm accounting storage is disabled\n")
GONE = (1, "", "slurm_load_jobs error: Invalid job id specified\n")
DOWN = (1, "", "slurm_load_jobs error: Unable to contact slurm controller\n")
SCRIPT = "# component 0: trainer\n#SBATCH hetjob\n# component 1: generator (2 replicas)\n"

MakeRun = Callable[..., RunDir]


def attempt(number: int) -> dict[str, Any]:
    """One that runs on another host, in no job."""
    return {
        "number": number,
        "started": time.time() - 50.0 + number,
        "host": "elsewhere",
        "pid": os.getpid(),
        "job_id": None,
        "resumed_from_step": 0,
        "outcome": "running",
        "reason": "",
    }
