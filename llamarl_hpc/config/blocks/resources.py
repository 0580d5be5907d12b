"""What each executor asks for, in Slurm's words."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from llamarl_hpc.config.blocks.base import Block


class ResourceConfig(Block):
    """What one executor asks for; Slurm's own long option names."""

    partition: str | None = Field(None, description="Slurm partition.")
    account: str | None = Field(None, description="Slurm account.")
    qos: str | None = Field(None, description="Slurm QoS.")
    nodes: PositiveInt = Field(1, description="Nodes (of each replica, for the generator).")
    ntasks_per_node: PositiveInt = Field(1, description="MPI ranks on each node.")
    cpus_per_task: PositiveInt = Field(1, description="Cores, and threads, of a rank.")
    gpus_per_node: NonNegativeInt = Field(0, description="GPUs; 0 runs on CPU.")
    gpu_type: str | None = Field(None, description="Type of the GPUs, where a site has several.")
    gpu_request: Literal["gpus_per_node", "gres", "gpus_per_task"] = Field(
        "gpus_per_node", description="The option by which the site wants GPUs to be asked for."
    )
    mem: str | None = Field(
        None, description="Memory per node, as Slurm writes it; `0` is all of a node."
    )
    mem_per_cpu: str | None = Field(None, description="Instead of `mem`: memory per core.")
    mem_per_gpu: str | None = Field(None, description="Instead of `mem`: memory per GPU.")
    constraint: str | None = Field(None, description="Slurm node features.")
    time: str | None = Field(
        None, description="Time limit, as Slurm writes it; the same for all executors."
    )
    options: dict[str, str] = Field(
        default_factory=dict,
        description="Other options of sbatch by their long names, e.g. `exclude: node7`; an empty "
        "text for those without a value.",
    )

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ntasks_per_node


class ResourcesConfig(Block):
    """One block per executor. In a Slurm job each is a component, unless `job` is set."""

    trainer: ResourceConfig = Field(default_factory=lambda: ResourceConfig())
    generator: ResourceConfig = Field(default_factory=lambda: ResourceConfig())
    reward: ResourceConfig = Field(default_factory=lambda: ResourceConfig())
    reference: ResourceConfig = Field(
        default_factory=lambda: ResourceConfig(),
        description="Only for a reference with `reference.placement: executor`.",
    )
    job: ResourceConfig | None = Field(
        None,
        description="One ordinary Slurm job for all executors, instead of a heterogeneous one.",
    )
