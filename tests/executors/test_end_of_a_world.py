"""How ranks whose work is done end: MPICH's launcher must not take one for dead."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
from llamarl_hpc.placement import MARKER, detect
import os, threading, time
os.environ[MARKER] = "trainer"
world = detect()
threading.Thread(target=time.sleep, args=(3600,)).start()  # must not keep the rank from ending
print(world.rank, flush=True)
world.leave()
"""


@pytest.mark.mpi
def test_ranks_that_leave_together_end_with_exit_code_0() -> None:
    """A rank that ends without a word to MPICH's launcher has the others killed, in about half of
    the starts: so there are several."""
    beside = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        pytest.skip("no mpiexec on this machine")
    env = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    for _ in range(6):
        answer = subprocess.run(
            [mpiexec, "-n", "4", sys.executable, "-c", _PROGRAM],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert answer.returncode == 0, answer.stdout + answer.stderr
        assert sorted(c for c in answer.stdout if c.isdigit()) == ["0", "1", "2", "3"]
