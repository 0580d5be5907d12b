"""A trainer rank that finds out how much memory it takes: steps on made-up rollouts.

Started under mpiexec by `llamarl-hpc trainer-memory --measure`, in the environment of a job step.
Rollouts are as long as the configuration allows, and enough of them that every rank adds two
micro-batches up. Nothing is sent anywhere; a checkpoint is copied in memory, and not written.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import msgspec
import numpy as np
import torch

from llamarl_hpc.config.load import load_config
from llamarl_hpc.config.schema import Config
from llamarl_hpc.placement import World, detect, init_process_group
from llamarl_hpc.storage.atomic import write_text
from llamarl_hpc.training import zero
from llamarl_hpc.training.engine import TrainerEngine
from llamarl_hpc.training.memory_task import Peaks, ProbeTask
from llamarl_hpc.training.resident import peak_bytes
from llamarl_hpc.types import TrainBatch

_STEPS = 3  # the moments come with the first one; then what is freed is used again


def probe(config: Config, world: World, model_folder: Path) -> list[Peaks] | None:
    """Peaks of all ranks, on the leader."""
    init_process_group(world, device="cpu")
    zero.import_deepspeed("cpu")
    importlib.import_module("transformers.models.llama.modeling_llama")
    loaded = peak_bytes()
    engine = TrainerEngine(config, world, model_folder)
    vocabulary = min(spec.shape[0] for spec in engine.parameter_specs() if "embed" in spec.name)
    batch = made_up_batch(config, world.size, vocabulary)
    for _ in range(_STEPS):
        engine.train_step(batch if world.is_leader else None)
    step = peak_bytes()
    copied = engine.snapshot()
    engine.train_step(batch if world.is_leader else None)  # while the copy is being written
    del copied
    return world.gather(Peaks(program=loaded, step=step, with_checkpoint=peak_bytes()))


def made_up_batch(config: Config, num_ranks: int, vocabulary: int) -> TrainBatch:
    """As long as `config` allows; whole groups, no more of them than a step has."""
    rollout, rng = config.rollout, np.random.default_rng(0)
    prompt, length = rollout.max_prompt_length, rollout.max_completion_length
    prompts = 1 if config.trainer.share_prompt else rollout.num_generations
    group_tokens = prompts * prompt + rollout.num_generations * length
    wanted = -(-2 * config.trainer.micro_batch_tokens // group_tokens) * num_ranks
    groups = min(max(wanted, 2 * num_ranks), rollout.prompts_per_step)
    num_rollouts = groups * rollout.num_generations
    num_tokens = num_rollouts * length
    return TrainBatch(
        step=0,
        temperature=1.0,
        prompt_ids=rng.integers(0, vocabulary, groups * prompt).astype(np.int32),
        prompt_lengths=np.full(groups, prompt, dtype=np.int32),
        group_index=np.repeat(np.arange(groups, dtype=np.int32), rollout.num_generations),
        completion_ids=rng.integers(0, vocabulary, num_tokens).astype(np.int32),
        completion_lengths=np.full(num_rollouts, length, dtype=np.int32),
        logprobs=np.full(num_tokens, -np.log(vocabulary), dtype=np.float32),
        loss_mask=np.ones(num_tokens, dtype=bool),
        advantages=np.where(np.arange(num_rollouts) % 2, 0.5, -0.5).astype(np.float32),
        logprobs_reference=np.full(num_tokens, -np.log(vocabulary), dtype=np.float32),
        lags=np.zeros(num_tokens, dtype=np.int32),
    )


def main(text: str) -> None:
    task = msgspec.json.decode(text, type=ProbeTask)
    world = detect()
    config = load_config(task.config)
    torch.set_num_threads(config.resources.trainer.cpus_per_task)
    peaks = probe(config, world, Path(task.model))
    if peaks is not None:
        write_text(Path(task.answer), msgspec.json.encode(peaks).decode())
    world.leave()


if __name__ == "__main__":
    main(sys.argv[1])
