"""One rank of a trainer under mpiexec; the leader writes what it saw as JSON.

mpiexec -n 2 python mpi_train.py MODEL_FOLDER WORK_FOLDER STAGE-DTYPE...

With STAGE-DTYPE=FOLDER it goes on from the checkpoint in FOLDER instead of from the start.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_policy import random_batch, tiny_config
from torch import Tensor

from llamarl_hpc.models.int8 import quantised
from llamarl_hpc.placement import World, detect, init_process_group
from llamarl_hpc.training.engine import TrainerEngine
from llamarl_hpc.weight_sync.quantised_source import QuantisedSource

NUM_GROUPS = (4, 1, 7, 3)  # of each step; with 1 a rank has nothing but dummies


def check_shards(engine: TrainerEngine, world: World) -> None:
    """What the ranks own, put together, is what is exported; and each reads it locally."""
    exported = dict(world.bcast(list(engine.export_state_dict())))
    for spec in engine.parameter_specs():
        flat = exported[spec.name].flatten()
        owned = engine.owned_range(spec.name)
        ranges = world.allgather(owned)
        if owned is not None:
            assert ranges[0][0] == 0 and ranges[-1][1] == spec.numel
            assert all(a[1] == b[0] for a, b in pairwise(ranges))
        start, end = owned or (0, spec.numel)
        assert torch.equal(engine.read(spec.name, start, end), flat[start:end]), spec.name
    check_quantised(engine, world, exported)


def check_quantised(engine: TrainerEngine, world: World, exported: dict[str, Tensor]) -> None:
    """What the ranks send as int8 are the bytes of the whole matrices."""
    source, expected = QuantisedSource(engine, world), dict(quantised(exported.items()))
    source.measure()
    assert [spec.name for spec in source.parameter_specs()] == list(expected)
    for spec in source.parameter_specs():
        start, end = source.owned_range(spec.name) or (0, spec.numel)
        flat = expected[spec.name].view(-1)[start:end]
        assert start == end or torch.equal(source.read(spec.name, start, end), flat), spec.name


def train(world: World, model_folder: Path, work_folder: Path, stage: int, dtype: str) -> None:
    config = tiny_config(zero_stage=stage, dtype=dtype, micro_batch_tokens=60)
    engine = TrainerEngine(config, world, model_folder)
    steps, logprobs = [], []
    for step, num_groups in enumerate(NUM_GROUPS):
        batch = random_batch(seed=step, step=step, num_groups=num_groups)
        result = engine.train_step(batch if world.is_leader else None)
        steps.append(result.metrics)
        logprobs.append(result.logprobs.tolist())
        if step == 1:
            engine.save(work_folder)
    check_shards(engine, world)
    engine.load(work_folder)
    assert engine.policy_version == 2
    batch = random_batch(seed=2, step=2, num_groups=NUM_GROUPS[2])
    resumed = engine.train_step(batch if world.is_leader else None).metrics
    if world.is_leader:
        report = {"steps": steps, "logprobs": logprobs, "resumed_loss": resumed["loss"]}
        (work_folder / "report.json").write_text(json.dumps(report))


def go_on(world: World, model_folder: Path, folder: Path, kind: str, checkpoint: Path) -> None:
    stage, dtype = kind.split("-")
    config = tiny_config(zero_stage=int(stage), dtype=dtype, micro_batch_tokens=60)
    engine = TrainerEngine(config, world, model_folder)
    engine.load(checkpoint)
    steps = []
    for step in range(engine.policy_version, len(NUM_GROUPS)):
        batch = random_batch(seed=step, step=step, num_groups=NUM_GROUPS[step])
        steps.append(engine.train_step(batch if world.is_leader else None).metrics)
    if world.is_leader:
        folder.mkdir(exist_ok=True)
        (folder / "resumed.json").write_text(json.dumps({"steps": steps}))


def main(model_folder: str, work_folder: str, *kinds: str) -> None:
    torch.set_num_threads(1)
    world = detect()
    init_process_group(world, device="cpu", timeout_s=60.0)
    for text in kinds:
        kind, _, checkpoint = text.partition("=")
        stage, dtype = kind.split("-")
        folder = Path(work_folder) / kind
        if checkpoint:
            go_on(world, Path(model_folder), folder, kind, Path(checkpoint))
        else:
            train(world, Path(model_folder), folder, int(stage), dtype)
    dist.destroy_process_group()
    world.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
