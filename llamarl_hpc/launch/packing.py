"""Which nodes of an ordinary allocation each executor gets: pure, first fit, in order.

Slurm could choose itself, but it spreads small steps over the nodes and then has no node left with
all its GPUs for the trainer. GPUs are never shared; cores are, when there are too few of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llamarl_hpc.config.schema import ResourceConfig
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.launch.allocation import NodeSet


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Where every executor runs."""

    nodes_of: Mapping[str, list[str]]
    crowded: frozenset[str]  # executors whose cores others have too


def pack(
    executors: Mapping[str, ResourceConfig], allocation: NodeSet, *, gpus_per_node: int
) -> Packing:
    """Give each executor nodes with enough free GPUs and, where possible, cores.

    Raises ConfigError when nodes or GPUs are too few.
    """
    free_gpus = dict.fromkeys(allocation.nodes, gpus_per_node)
    free_cpus = dict(zip(allocation.nodes, allocation.cpus, strict=True))
    nodes_of: dict[str, list[str]] = {}
    crowded: set[str] = set()
    for name, block in executors.items():
        able = [node for node in allocation.nodes if free_gpus[node] >= block.gpus_per_node]
        cores = block.ntasks_per_node * block.cpus_per_task
        roomy = [node for node in able if free_cpus[node] >= cores]
        if len(roomy) < block.nodes and not block.gpus_per_node:
            crowded.add(name)
            roomy = sorted(able, key=lambda node: -free_cpus[node])  # stable: first of the best
        if len(roomy) < block.nodes:
            raise ConfigError(_too_small(name, block, allocation, gpus_per_node, len(roomy)))
        nodes_of[name] = roomy[: block.nodes]
        for node in nodes_of[name]:
            free_gpus[node] -= block.gpus_per_node
            free_cpus[node] -= cores
    return Packing(nodes_of=nodes_of, crowded=frozenset(crowded))


def _too_small(
    name: str, block: ResourceConfig, allocation: NodeSet, gpus_per_node: int, able: int
) -> str:
    wanted = f"{name} wants {block.nodes} node(s)"
    if block.gpus_per_node:
        cores = block.ntasks_per_node * block.cpus_per_task
        wanted += f" with {block.gpus_per_node} free GPUs and {cores} free cores each"
    return (
        f"the Slurm job has {len(allocation.nodes)} node(s) of {gpus_per_node} GPUs and "
        f"{min(allocation.cpus)} cores, but {wanted} and there are {able}; ask for a larger job or "
        "give the executors less (resources)"
    )
