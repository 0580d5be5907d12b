"""One side of `llamarl-hpc bench train`: loads the model, makes a step whenever it is told to.

The learning rate is 0, so every step is the same step and gradient norms can be compared; the
optimizer does all its work. All sides read the same rollouts (`task.py`).
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np
import torch

from llamarl_hpc.config.schema import Config
from llamarl_hpc.placement import World, init_process_group
from llamarl_hpc.training.bench.parent import Parent, Stopwatch
from llamarl_hpc.training.bench.task import Measured, Ready, Task, train_batch
from llamarl_hpc.training.engine import TrainerEngine
from llamarl_hpc.training.resident import peak_bytes, resident_bytes


def config_of(task: Task) -> Config:
    """Our trainer with TRL's loss."""
    return Config.model_validate(
        {
            "algorithm": {"loss_type": "dapo"},
            "rollout": {
                "max_prompt_length": task.prompt_tokens,
                "max_completion_length": task.completion_tokens,
            },
            "trainer": {
                "learning_rate": 0.0,
                "zero_stage": task.zero_stage,
                "micro_batch_tokens": task.micro_batch_tokens,
                "skip_zero_advantage": task.side == "ours_skipping",
            },
        }
    )


def serve(task: Task, parent: Parent) -> None:
    """Our side. Never returns."""
    imports_bytes = resident_bytes()
    world = World()
    init_process_group(world, device="cpu")
    engine = TrainerEngine(config_of(task), world, Path(task.model))
    batch = train_batch(task)
    logprobs = engine.train_step(batch).logprobs
    # On policy, as TRL is: every ratio is 1. Those of skipped rollouts are never looked at.
    batch = msgspec.structs.replace(batch, logprobs=np.nan_to_num(logprobs))
    parent.tell(Ready(imports_bytes=imports_bytes))
    while True:
        parent.wait_for_go()
        watch = Stopwatch()
        grad_norm = engine.train_step(batch).metrics["grad_norm"]
        seconds, cpu_s = watch.measured()
        parent.tell(
            Measured(seconds=seconds, cpu_s=cpu_s, grad_norm=grad_norm, peak_bytes=peak_bytes())
        )


def main(text: str) -> None:
    task = msgspec.json.decode(text, type=Task)
    torch.set_num_threads(task.threads)
    parent = Parent(task.pipe)
    if task.side == "trl":
        from llamarl_hpc.training.bench import trl as bench_trl

        bench_trl.serve(task, parent)
    else:
        serve(task, parent)


if __name__ == "__main__":
    main(sys.argv[1])
