"""How weights are to travel, against what they would travel between."""

from __future__ import annotations

from collections.abc import Iterator

from llamarl_hpc.config.schema import Config


def sync_sentences(config: Config) -> Iterator[str]:
    """One sentence for each contradiction."""
    sync, resources = config.weight_sync, config.resources
    nodes = max(resources.trainer.nodes, resources.generator.nodes)
    if sync.transport == "shared_memory" and nodes > 1:
        yield (
            f"weight_sync.transport 'shared_memory' works on one node but an executor has "
            f"{nodes}; use 'collective' or 'auto'"
        )
    on_gpus = resources.trainer.gpus_per_node > 0 and resources.generator.gpus_per_node > 0
    several = resources.generator.num_ranks > 1
    if sync.replica_memory == "window" and on_gpus and several:
        yield (
            "weight_sync.replica_memory 'window' is memory of the CPU, but weights go from GPU to "
            "GPU; use 'parts' or 'auto'"
        )
    parts = sync.replica_memory == "parts" or (sync.replica_memory == "auto" and on_gpus)
    if sync.delta == "auto" and parts and several and sync.transport != "shared_memory":
        yield (
            "weight_sync.delta 'auto' needs a receiver that holds the whole version before, but "
            f"weight_sync.replica_memory '{sync.replica_memory}' keeps only parts; set "
            "weight_sync.delta to 'off'"
        )
