"""From a trainer's checkpoint to whole tensors, without starting a trainer.

ZeRO 0-2 keep whole parameters beside the optimizer's partitions; ZeRO-3 keeps partitions only, so
there the float32 master weights of all ranks are put together and rounded as the trainer does.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path

import torch
from torch import Tensor

from llamarl_hpc.errors import StoreError
from llamarl_hpc.models.load import tensor_names, torch_dtype
from llamarl_hpc.training import zero
from llamarl_hpc.training.engine import CHECKPOINT_TAG, read_description

_PREFIX = "causal_lm."  # of the model inside PolicyModel


def checkpoint_tensors(folder: Path, model_folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor in the trainer's dtype) of every tensor of the model.

    `folder` is what `TrainerEngine.save` was given; `model_folder` says which names the model has
    (a tied output matrix is left out when it is not among them). Raises StoreError when the
    checkpoint is not whole.
    """
    description = read_description(folder / "zero")
    dtype = torch_dtype(description["trainer.dtype"])
    try:
        if description["trainer.zero_stage"] == 3:
            tensors = _gather_partitions(folder / "zero")
        else:
            path = folder / "zero" / CHECKPOINT_TAG / "mp_rank_00_model_states.pt"
            tensors = torch.load(path, weights_only=True, mmap=True)["module"]
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise StoreError(f"cannot read {folder}: {error}; export an earlier checkpoint") from error
    for name in sorted(tensor_names(model_folder)):
        if _PREFIX + name in tensors:
            yield name, tensors[_PREFIX + name].contiguous().to(dtype)


def _gather_partitions(folder: Path) -> Mapping[str, Tensor]:
    """Whole float32 tensors by name; each is put together when it is made contiguous."""
    zero.import_deepspeed("cpu")
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with redirect_stdout(io.StringIO()):  # its progress
        tensors: Mapping[str, Tensor] = get_fp32_state_dict_from_zero_checkpoint(
            str(folder), tag=CHECKPOINT_TAG, lazy_mode=True
        )
    return tensors
