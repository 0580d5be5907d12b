"""Generator replicas and how weights reach them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from llamarl_hpc.config.blocks.base import Block


class GeneratorConfig(Block):
    """Each replica is one job step, one MPI world, one engine."""

    engine: Literal["native"] = Field("native", description="Native PyTorch engine.")
    replicas: PositiveInt = Field(2, description="Number of replicas.")
    replicas_per_node: PositiveInt = Field(
        1,
        description="Replicas that share a node of their Slurm component; each then gets what "
        "`resources.generator` says.",
    )
    dtype: Literal["fp32", "bf16"] = Field("fp32", description="Weights and KV cache.")
    quantization: Literal["none", "int8"] = Field(
        "none",
        description="`int8`: the layers' matrices travel and are kept as 8-bit integers, with a "
        "float32 scale for every row; the trainer quantises what it sends. Embedding, output "
        "matrix and norms stay as they are.",
    )
    max_concurrency: PositiveInt = Field(64, description="Sequences decoded at a time, a replica.")
    prefill_tokens: PositiveInt = Field(
        2048, description="Prompt tokens computed in one step at most."
    )
    recompute_kv_cache: bool = Field(
        False,
        description="When weights change within a completion "
        "(`algorithm.in_flight_weight_updates`), compute its keys and values anew with the new "
        "weights, which costs a prefill. `false` keeps those of the older weights.",
    )
    nice: Annotated[int, Field(ge=0, le=19)] = Field(
        0,
        description="How far the replicas step back when cores are short (as `nice` does): on a "
        "laptop they then fill what the trainer leaves instead of slowing it down.",
    )


class WeightSyncConfig(Block):
    """How weights get from the trainer to the generators."""

    transport: Literal["auto", "shared_memory", "collective"] = Field(
        "auto",
        description="`shared_memory` needs all executors on one node; `collective` is broadcasts "
        "by the ranks that own the shards (NCCL or gloo). `auto` takes the first that can work.",
    )
    bucket_mb: PositiveInt = Field(64, description="Bytes of one broadcast, in MiB.")
    timeout_s: PositiveFloat = Field(300.0, description="After that the slow member is named.")
    verify: Literal["full", "sampled", "off"] = Field(
        "full",
        description="What is summed and compared before a version is used: all of it, another "
        "sixteenth of it with every version, or nothing.",
    )
    replica_memory: Literal["auto", "window", "parts"] = Field(
        "auto",
        description="How the ranks of a replica get a version with `collective`. `window`: one on "
        "each node receives it whole, into an MPI window that all there read. `parts`: each "
        "receives it, and keeps only what it computes with. `auto`: parts on GPUs, else window.",
    )
    delta: Literal["off", "auto"] = Field(
        "off",
        description="With `collective`: send only the words that have changed since the version "
        "before, bucket by bucket where that is less than half of it (bfloat16 at small learning "
        "rates). Exact. Takes memory for a second copy of what a trainer rank sends.",
    )
