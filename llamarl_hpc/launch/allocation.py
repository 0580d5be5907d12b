"""The Slurm job around this process, and what of its environment others may see.

Job steps find their own place in placement.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llamarl_hpc.slurm_text.cpu_counts import expand_counts
from llamarl_hpc.slurm_text.node_list import expand_nodes


@dataclass(frozen=True, kw_only=True)
class NodeSet:
    """Nodes of one kind: a component of a heterogeneous job, or all of an ordinary one."""

    nodes: list[str]
    cpus: list[int]  # of each node, that are ours


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The Slurm job around this process."""

    job_id: str  # of a heterogeneous job: the leader's
    components: list[NodeSet]
    is_heterogeneous: bool
    in_step: bool  # this process is part of a job step, which holds what it was given

    @property
    def hosts(self) -> set[str]:
        return {node for component in self.components for node in component.nodes}


_INTERACTIVE_STEP = "4294967290"  # the shell that salloc opens on a node, where sites want that


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The job that `environ` describes: in a batch script, a job step, or a shell of salloc."""
    job_id = environ.get("SLURM_JOB_ID")
    if not job_id or "SLURM_JOB_NODELIST" not in environ:
        return None
    size = int(environ.get("SLURM_HET_SIZE", "0"))
    suffixes = [f"_HET_GROUP_{k}" for k in range(size)] if size else [""]
    return Allocation(
        job_id=environ.get("SLURM_JOB_ID_HET_GROUP_0", job_id),
        components=[_node_set(environ, suffix) for suffix in suffixes],
        is_heterogeneous=size > 0,
        in_step=environ.get("SLURM_STEP_ID", _INTERACTIVE_STEP) != _INTERACTIVE_STEP,
    )


def _node_set(environ: Mapping[str, str], suffix: str) -> NodeSet:
    nodes = expand_nodes(environ[f"SLURM_JOB_NODELIST{suffix}"])
    cpus = expand_counts(environ.get(f"SLURM_JOB_CPUS_PER_NODE{suffix}", f"1(x{len(nodes)})"))
    return NodeSet(nodes=nodes, cpus=cpus)


def restart_count(environ: Mapping[str, str]) -> int:
    """How often Slurm has started the batch script of the job around us again."""
    text = environ.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdigit() else 0


# What srun needs to find its job; everything else that Slurm put into the environment would be
# taken for options of the step (bindings, memory, tasks, GPUs of a request of another shape).
_KEPT = {"SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CLUSTERS", "SLURM_CLUSTER_NAME"}
_KEPT |= {"SLURM_HET_SIZE", "SLURM_JOB_NODELIST", "SLURM_NODE_ALIASES", "SLURM_RESTART_COUNT"}
_KEPT_OF_COMPONENT = ("SLURM_JOB_ID_HET_GROUP_", "SLURM_JOB_NODELIST_HET_GROUP_")
_FROM_LAUNCHERS: tuple[str, ...] = (
    "SLURM_",
    "SLURMD_",
    "SRUN_",
    "SBATCH_",
    "SALLOC_",
    "SQUEUE_",
    "SACCT_",
    "SCANCEL_",
    "SCONTROL_",
    "PMI_",
    "PMI2_",
    "PMIX_",
)
_FROM_LAUNCHERS += ("OMPI_", "MPI_LOCAL", "HYDRA_", "SUBMITIT_")


def inside_allocation(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for an srun in the job around us, which is to hear of nothing but its arguments."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(_FROM_LAUNCHERS)
        or name in _KEPT
        or name.startswith(_KEPT_OF_COMPONENT)
    }


def outside_allocation(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for commands about other jobs, sbatch first of all: variables of a job around us,
    and the SBATCH_ ones that would override the batch script, are gone."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(_FROM_LAUNCHERS) or name == "SLURM_CONF"
    }
