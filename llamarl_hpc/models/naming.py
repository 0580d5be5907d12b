"""Which names of a model are one tensor: tied parameters are sent, counted and saved once.

Identity is storage, not names: `lm_head.weight` of a tied model is the same memory as
`model.embed_tokens.weight`. The name that comes first in the model stands for the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


def named_unique_tensors(model: Module) -> list[tuple[str, Tensor]]:
    """Every parameter once, under its first name, in the order of the model."""
    return [(name, tensor) for name, first, tensor in _walk(model) if name == first]


def tied_aliases(model: Module) -> dict[str, str]:
    """Every further name of a shared parameter -> the name it has in `named_unique_tensors`."""
    return {name: first for name, first, _ in _walk(model) if name != first}


def _walk(model: Module) -> Iterator[tuple[str, str, Tensor]]:
    """(name, first name of the same tensor, tensor) for all names, shared ones included."""
    first_name: dict[object, str] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        yield name, first_name.setdefault(_identity(tensor), name), tensor


def _identity(tensor: Tensor) -> object:
    """Equal for two names of the same elements.

    A parameter without memory of its own (meta device; ZeRO-3 outside the forward, where all
    parameters point at nothing) is only identical with itself.
    """
    storage = tensor.untyped_storage()
    if tensor.is_meta or tensor.numel() == 0 or storage.data_ptr() == 0:
        return id(tensor)
    layout = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    return (tensor.device, storage.data_ptr(), layout)
