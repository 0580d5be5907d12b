"""What the weights of a run take of /dev/shm on a node. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llamarl_hpc.config.schema import Config
from llamarl_hpc.placement import device_of

_BYTES = {"fp32": 4, "bf16": 2}
_SLOTS = 2  # versions that shared-memory weight sync keeps


@dataclass(frozen=True, kw_only=True)
class Need:
    """Of one way in which weights travel."""

    role: str  # on whose nodes
    num_bytes: int
    what: str
    way_out: str
    is_fatal: bool = True  # False: the run takes another way


def needs(
    config: Config, shapes: Mapping[str, Sequence[int]], *, one_host: bool
) -> Mapping[str, Need]:
    """By role; empty when no weights lie there. `shapes`: of the model's tensors.

    Replicas that share a node of several are taken to have one each.
    """
    sync, replica = config.weight_sync, config.resources.generator
    devices = {device_of(config, role) for role in ("trainer", "generator")}
    size = version_bytes(config, shapes)
    if sync.transport == "shared_memory" or (
        sync.transport == "auto" and one_host and devices == {"cpu"}
    ):
        need = Need(
            role="trainer",
            num_bytes=_SLOTS * size,
            what="two copies of the weights",
            way_out="weight_sync.transport: collective",
            is_fatal=sync.transport == "shared_memory",
        )
    elif replica.num_ranks > 1 and (
        sync.replica_memory == "window" or (sync.replica_memory == "auto" and devices != {"cuda"})
    ):
        number = config.generator.replicas if one_host else 1
        need = Need(
            role="generator",
            num_bytes=number * size,
            what="a window for the weights" if number == 1 else f"{number} windows for the weights",
            way_out="weight_sync.replica_memory: parts",
        )
    else:
        return {}
    return {need.role: need} if size else {}


def version_bytes(config: Config, shapes: Mapping[str, Sequence[int]]) -> int:
    """Of a version as it travels: in the trainer's dtype, layers as int8 if generators are."""
    int8: set[str] = set()
    if config.generator.quantization == "int8":
        from llamarl_hpc.models.int8 import is_quantised  # which imports torch

        int8 = {name for name, shape in shapes.items() if is_quantised(name, shape)}
    item = _BYTES[config.trainer.dtype]
    return sum(
        math.prod(shape) + shape[0] * _BYTES["fp32"] if name in int8 else math.prod(shape) * item
        for name, shape in shapes.items()
    )
