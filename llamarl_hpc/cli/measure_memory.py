"""The memory that trainer ranks really take, from a few steps of theirs on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from llamarl_hpc.config.load import save_resolved
from llamarl_hpc.config.schema import Config
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.launch.steps import MpiExec, step_environment
from llamarl_hpc.training.memory_task import Peaks, ProbeTask

_DEADLINE_S = 3600.0


def measure_peaks(config: Config, model: Path, num_ranks: int) -> list[Peaks]:
    """Of each rank, all of them on this machine. Raises ConfigError when they cannot do it."""
    if config.resources.trainer.gpus_per_node:
        raise ConfigError(
            "--measure reads the memory of processes, but resources.trainer has GPUs; set "
            "resources.trainer.gpus_per_node=0"
        )
    as_root = os.geteuid() == 0
    with tempfile.TemporaryDirectory(prefix="trainer-memory-") as folder:
        task = ProbeTask(
            config=f"{folder}/config.yaml", model=str(model), answer=f"{folder}/answer.json"
        )
        save_resolved(config, task.config)
        program = [sys.executable, "-m", "llamarl_hpc.training.memory_probe"]
        try:
            done = subprocess.run(
                [
                    *MpiExec.find().argv(num_ranks, as_root=as_root),
                    *program,
                    msgspec.json.encode(task).decode(),
                ],
                env=step_environment(config, "trainer", base=os.environ, as_root=as_root),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=_DEADLINE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"the trainer's ranks did not finish within {_DEADLINE_S:.0f} s; take a smaller "
                "trainer.micro_batch_tokens"
            ) from None
        answer = Path(task.answer)
        if done.returncode != 0 or not answer.exists():
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise ConfigError(
                f"the trainer's ranks ended with code {done.returncode} ({last}); is the "
                "estimate more than this machine has?"
            )
        return msgspec.json.decode(answer.read_bytes(), type=list[Peaks])
