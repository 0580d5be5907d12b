"""From a trainer's checkpoint to whole tensors, without starting a trainer or DeepSpeed.

The float32 weights that the ranks wrote are put together, one parameter at a time, and rounded as
the trainer does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from llamarl_hpc.config.schema import LoraConfig
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.models.load import model_tensors, tensor_names, torch_dtype
from llamarl_hpc.storage.tensor_shards import ShardReader
from llamarl_hpc.training.engine import WEIGHT
from llamarl_hpc.training.lora import adapters_of, merge_all
from llamarl_hpc.training.snapshot import FOLDER, read_description


def checkpoint_tensors(folder: Path, model_folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor in the trainer's dtype) of every tensor of the model.

    `folder` is what `TrainerEngine.save` was given; `model_folder` says which names the model has
    (a tied output matrix is left out when it is not among them) and holds what was frozen: with
    LoRA the adapters are merged into it. Raises StoreError when the checkpoint is not whole.
    """
    description = read_description(folder / FOLDER)
    dtype = torch_dtype(description["trainer.dtype"])
    if description["model.lora"] is not None:
        lora, trained = checkpoint_adapters(folder)
        base = model_tensors(model_folder)
        yield from merge_all(base, adapters_of(trained, lora), dtype)
        return
    reader = ShardReader(folder / FOLDER, description["ranks"])
    shapes: dict[str, list[int]] = description["parameters"]
    for name in sorted(tensor_names(model_folder) & shapes.keys()):
        yield name, read_whole(reader, name, shapes[name]).to(dtype)


def checkpoint_adapters(folder: Path) -> tuple[LoraConfig, dict[str, Tensor]]:
    """The adapters of a run with LoRA, in the trainer's dtype, as `...q_proj.lora_A.weight`.

    Raises ConfigError when the run had none.
    """
    description = read_description(folder / FOLDER)
    if description["model.lora"] is None:
        raise ConfigError("this run trained all weights and has no adapter; leave out --adapter")
    reader = ShardReader(folder / FOLDER, description["ranks"])
    dtype = torch_dtype(description["trainer.dtype"])
    shapes: dict[str, list[int]] = description["parameters"]
    trained = {name: read_whole(reader, name, shape).to(dtype) for name, shape in shapes.items()}
    return LoraConfig.model_validate(description["model.lora"]), trained


def read_whole(reader: ShardReader, name: str, shape: list[int]) -> Tensor:
    """The float32 weights of a parameter."""
    values = np.empty(int(np.prod(shape)), dtype=np.float32)
    reader.read(f"{name}/{WEIGHT}", 0, values)
    return torch.from_numpy(values).reshape(shape)
