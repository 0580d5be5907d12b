"""Run by test_tensor_parallel.py under mpiexec: every rank is one of a replica's. For each model
folder the leader writes what the engine drew, with one change of weights in between. The last
folder's ranks meet as those on GPUs do, in torch.distributed's default group (here over gloo).
Folders called int8... are run with quantised weights.

    ranks_program.py OUT FOLDER NEXT [FOLDER NEXT ...]      (NEXT: the new weights)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from engine_runs import drain, random_prompts, request
from mpi4py import MPI
from safetensors.torch import load_file

from llamarl_hpc.generation.native import runner as runner_module
from llamarl_hpc.generation.native.engine import NativeEngine
from llamarl_hpc.generation.native.runner import ModelRunner, Work
from llamarl_hpc.generation.native.sharding import part_of
from llamarl_hpc.generation.native.tensor_parallel import GroupRanks
from llamarl_hpc.models.int8 import quantised
from llamarl_hpc.placement import World, init_process_group
from llamarl_hpc.types import TensorPart

SIZES = {"max_context": 96}
SWITCH_AT = 5  # step before which the new weights are loaded


def is_int8(folder: Path) -> bool:
    return folder.name.startswith("int8")


def drawn(folder: Path, new: Path, world: World, *, recompute: bool) -> list[dict[str, Any]]:
    """The leader: completions of greedy and random groups that start one after the other."""
    engine = NativeEngine(
        folder,
        dtype="fp32",
        max_concurrency=6,
        prefill_tokens=40,
        recompute_kv_cache=recompute,
        world=world,
        int8=is_int8(folder),
        **SIZES,
    )
    for number, prompt in enumerate(random_prompts(6, low=10)):
        shared = list(range(40, 60)) if number % 2 else []  # a prefix that is copied
        temperature = 0.0 if number < 3 else 0.9
        engine.submit(
            request(number, shared + prompt, n=2, temperature=temperature, max_tokens=9 + number)
        )

    def switch(step: int) -> None:
        if step == SWITCH_AT:
            world.share("load")
            engine.load_weights(1, _weights(new, engine.parts(), cut=recompute))

    done = drain(engine, switch)
    world.share("end")
    return [
        {
            "ids": completion.token_ids.tolist(),
            "logprobs": completion.logprobs.tolist(),
            "versions": [[span.start, span.end, span.version] for span in completion.versions],
        }
        for _, group in sorted(done.items())
        for completion in group.completions
    ]


def follow(folder: Path, new: Path, world: World, *, recompute: bool) -> None:
    runner = ModelRunner(
        folder,
        dtype="fp32",
        slots=6,
        device="cpu",
        world=world,
        int8=is_int8(folder),
        **SIZES,
    )
    while (command := world.share()) != "end":
        if isinstance(command, Work):
            runner.follow(command)
        else:
            runner.load_weights(_weights(new, runner.parts, cut=recompute))


def _weights(
    folder: Path, parts: list[TensorPart], *, cut: bool
) -> Iterable[tuple[str, torch.Tensor]]:
    """Whole tensors, or with `cut` only what this rank keeps."""
    tensors = load_file(folder / "model.safetensors")
    if is_int8(folder):
        tensors = dict(quantised(tensors.items()))
    return [(p.name, part_of(tensors[p.name], p) if cut else tensors[p.name]) for p in parts]


def main(out: Path, folders: list[Path]) -> None:
    comm = MPI.COMM_WORLD
    world = World(rank=comm.rank, size=comm.size, local_size=comm.size, comm=comm)
    torch.set_num_threads(1)
    init_process_group(world, device="cpu")
    results = []
    for number, (folder, new) in enumerate(zip(folders[::2], folders[1::2], strict=True)):
        recompute = number % 2 == 1
        if folder == folders[-2]:
            runner_module.join_ranks = lambda world, device, widths: GroupRanks(world, widths)
        if world.is_leader:
            results.append(drawn(folder, new, world, recompute=recompute))
        else:
            follow(folder, new, world, recompute=recompute)
    if world.is_leader:
        out.write_text(json.dumps(results))
    world.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(word) for word in sys.argv[2:]])
