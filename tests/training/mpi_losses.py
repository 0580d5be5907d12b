"""One rank of a trainer under mpiexec that makes two steps with every loss.

mpiexec -n 2 python mpi_losses.py MODEL_FOLDER REPORT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from loss_configs import ALGORITHMS, name_of
from tiny_policy import random_batch, tiny_config

from llamarl_hpc.placement import detect, init_process_group
from llamarl_hpc.training.engine import TrainerEngine


def main(model_folder: str, report: str) -> None:
    torch.set_num_threads(1)
    world = detect()
    init_process_group(world, device="cpu", timeout_s=60.0)
    metrics = {}
    for algorithm in ALGORITHMS:
        config = tiny_config(micro_batch_tokens=60, algorithm=algorithm)
        engine = TrainerEngine(config, world, Path(model_folder))
        metrics[name_of(algorithm)] = [
            engine.train_step(random_batch(seed=s, step=s) if world.is_leader else None).metrics
            for s in range(2)
        ]
    if world.is_leader:
        Path(report).write_text(json.dumps(metrics))
    dist.destroy_process_group()
    world.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
