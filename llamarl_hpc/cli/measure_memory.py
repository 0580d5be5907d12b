"""The memory that trainer ranks really take, from a few steps of theirs on this machine."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import msgspec

from llamarl_hpc.config.load import save_resolved
from llamarl_hpc.config.schema import Config
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.launch.children import run_ranks
from llamarl_hpc.launch.steps import step_environment
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
        try:
            code, last = run_ranks(
                num_ranks,
                "llamarl_hpc.training.memory_probe",
                msgspec.json.encode(task).decode(),
                env=step_environment(config, "trainer", base=os.environ, as_root=as_root),
                timeout_s=_DEADLINE_S,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"the trainer's ranks did not finish within {_DEADLINE_S:.0f} s; take a smaller "
                "trainer.micro_batch_tokens"
            ) from None
        answer = Path(task.answer)
        if code != 0 or not answer.exists():
            raise ConfigError(
                f"the trainer's ranks ended with code {code} ({last}); is the estimate more than "
                "this machine has?"
            )
        return msgspec.json.decode(answer.read_bytes(), type=list[Peaks])
