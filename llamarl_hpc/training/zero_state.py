"""Where AdamW keeps what it knows of each parameter: float32 weights and two moments.

DeepSpeed lays them out in a different way for every stage and dtype. Here they are all the same:
fragments, each some elements of one parameter within some tensor that the optimizer updates. So a
checkpoint can be written and read without a word about stages or ranks.

    stage 0 fp32   the parameter itself, whole on every rank
    stage 0 bf16   a float32 copy of each parameter, whole on every rank
    stages 1, 2    flat float32 partitions, cut anywhere within a parameter
    stage 3        flat float32 partitions, an equal part of every parameter
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llamarl_hpc.placement import World
from llamarl_hpc.training import zero

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """Elements [start, end) of a flattened parameter, at `offset` of what the optimizer updates."""

    name: str
    start: int
    end: int
    holder: Tensor
    offset: int

    def within(self, whole: Tensor) -> Tensor:
        """1-D view of the same elements of `holder`, or of a moment of the same shape."""
        return whole.detach().view(-1)[self.offset : self.offset + self.end - self.start]

    def cut(self, part: int, num_parts: int) -> Fragment:
        """One of `num_parts` about equal parts."""
        length = self.end - self.start
        first, last = length * part // num_parts, length * (part + 1) // num_parts
        return Fragment(
            name=self.name,
            start=self.start + first,
            end=self.start + last,
            holder=self.holder,
            offset=self.offset + first,
        )


def held_fragments(engine: Any, parameters: Mapping[str, Tensor], world: World) -> list[Fragment]:
    """What this rank holds of the trained `parameters`; `engine` is a DeepSpeedEngine."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        found = _of_stage_3(optimizer, parameters, world)
    elif hasattr(optimizer, "fp32_groups"):
        found = _of_copies(optimizer, parameters)
    elif any(hasattr(parameter, "_hp_mapping") for parameter in parameters.values()):
        found = _of_flat_partitions(optimizer, parameters)
    else:
        found = (_whole(name, parameter, parameter) for name, parameter in parameters.items())
    return [fragment for fragment in found if fragment.start < fragment.end]


def is_replicated(engine: Any) -> bool:
    """Whether every rank holds all fragments (stage 0)."""
    return int(engine.zero_optimization_stage()) == 0


def moments(engine: Any, fragment: Fragment) -> dict[str, Tensor]:
    """1-D moments of a fragment; zeros before the first step."""
    state = engine.basic_optimizer.state.get(fragment.holder, {})
    return {
        key: fragment.within(state[key])
        if key in state
        else torch.zeros(fragment.end - fragment.start)
        for key in MOMENTS
    }


def prepare_moments(engine: Any, num_steps: int) -> None:
    """Room for the moments of everything the optimizer updates, as after `num_steps` steps."""
    optimizer = engine.basic_optimizer
    for holder in _holders(engine):
        state = optimizer.state[holder]
        for key in MOMENTS:
            state.setdefault(key, torch.zeros_like(holder.detach()))
        if isinstance(optimizer, torch.optim.AdamW):
            state["step"] = torch.tensor(float(num_steps), device=holder.device)
        else:
            state["step"] = num_steps


def spread(engine: Any) -> None:
    """Make the model's parameters from the float32 weights of all ranks. Collective."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        _spread_stage_3(optimizer)
    elif hasattr(optimizer, "fp32_groups"):
        for pair in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for low, high in zip(*pair, strict=True):
                low.data.copy_(high.data)
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()


# ---------------------------------------------------------------- by kind of optimizer


def _whole(name: str, parameter: Tensor, holder: Tensor) -> Fragment:
    return Fragment(name=name, start=0, end=parameter.numel(), holder=holder, offset=0)


def _of_copies(optimizer: Any, parameters: Mapping[str, Tensor]) -> Iterator[Fragment]:
    copies = {
        id(low): high
        for pair in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        for low, high in zip(*pair, strict=True)
    }
    for name, parameter in parameters.items():
        yield _whole(name, parameter, copies[id(parameter)])


def _of_flat_partitions(optimizer: Any, parameters: Mapping[str, Tensor]) -> Iterator[Fragment]:
    partitions = getattr(optimizer, "single_partition_of_fp32_groups", None)
    if partitions is None:
        partitions = optimizer.fp32_groups_flat_partition
    for name, parameter in parameters.items():
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:  # all of it is on other ranks
            continue
        low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
        yield Fragment(
            name=name,
            start=low.start,
            end=low.start + low.numel,
            holder=partitions[mapping.param_group_index],
            offset=high.start,
        )


def _of_stage_3(
    optimizer: Any, parameters: Mapping[str, Tensor], world: World
) -> Iterator[Fragment]:
    for name, parameter in parameters.items():
        group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start, end = zero.partition_range(parameter, world)
        holder = optimizer.fp32_partitioned_groups_flat[group]
        yield Fragment(name=name, start=start, end=end, holder=holder, offset=offset)


def _holders(engine: Any) -> list[Tensor]:
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return list(optimizer.fp32_partitioned_groups_flat)  # its param_groups are empty
    return [p for group in engine.basic_optimizer.param_groups for p in group["params"]]


def _spread_stage_3(optimizer: Any) -> None:
    optimizer.checkpoint_event_prologue()  # small parameters may be whole on every rank
    for group, high in enumerate(optimizer.fp32_partitioned_groups_flat):
        low = optimizer.fp16_partitioned_groups_flat[group]
        low.data.copy_(high.data)
        parts = optimizer.unflatten(low, optimizer.fp16_partitioned_groups[group])
        for partition, part in zip(optimizer.fp16_partitioned_groups[group], parts, strict=True):
            partition.data = part.data
    optimizer.checkpoint_event_epilogue()
