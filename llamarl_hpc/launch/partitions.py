"""What a partition would refuse, or never start, said before anything is submitted."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence

from llamarl_hpc.config.schema import Config
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.launch.node_share import NodeShare
from llamarl_hpc.launch.queue import Run, run_command
from llamarl_hpc.launch.request import components_of
from llamarl_hpc.launch.script import Options
from llamarl_hpc.slurm_text import node_kinds
from llamarl_hpc.slurm_text.node_kinds import NodeKind
from llamarl_hpc.slurm_text.show_partition import Partition, parse_partitions
from llamarl_hpc.slurm_text.time_limit import parse_time

Kinds = Mapping[str, Sequence[NodeKind]]  # by partition; without those that sinfo keeps to itself


def check_partitions(config: Config, run: Run = run_command) -> None:
    """Raise ConfigError for a partition that is not there or takes no jobs, for a time or a number
    of nodes above its limits, and for cores, memory or GPUs that none of its nodes has. What
    scontrol and sinfo do not say is not checked: sbatch has the last word in any case."""
    answer = run(["scontrol", "--oneliner", "show", "partition"])
    known = parse_partitions(answer.stdout) if not answer.returncode else {}
    if not known:
        return
    answer = run(["sinfo", "--noheader", "--all", "--exact", f"--format={node_kinds.FORMAT}"])
    kinds = node_kinds.parse_node_kinds(answer.stdout) if not answer.returncode else {}
    for component in components_of(config):
        for fault in _faults(component.options, known, kinds):
            raise ConfigError(f"{component.name}: {fault}")


def _faults(options: Options, known: Mapping[str, Partition], kinds: Kinds) -> Iterator[str]:
    names = [name for name in str(options.get("partition") or "").split(",") if name]
    if not names:
        names = [name for name, partition in known.items() if partition.is_default]
        if not names:
            yield f"this cluster has no default partition; name one of {_listed(known)}"
            return
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else f"; there are {_listed(known)}"
            yield f"there is no partition '{name}'{hint}"
            return
    refusals = [_refusal(options, known[name], kinds.get(name, [])) for name in names]
    if all(refusals):  # of several partitions one must take it
        yield refusals[0]


def _refusal(options: Options, partition: Partition, kinds: Sequence[NodeKind]) -> str:
    """Why the partition would never start this; empty when it would."""
    if partition.state != "UP":
        return f"partition '{partition.name}' is {partition.state} and starts no jobs; take another"
    if words := NodeShare.of(options).misfit(kinds, partition.max_cores_per_node):
        return f"partition '{partition.name}' cannot take it: {words}"
    if options.get("qos") or options.get("reservation"):  # they may lift the partition's limits
        return ""
    seconds = parse_time(str(options["time"])) if options.get("time") else None
    if seconds and partition.max_time_s is not None and seconds > partition.max_time_s:
        return (
            f"the time limit {options['time']} is above the {partition.max_time} of partition "
            f"'{partition.name}'; shorten it (a run goes on in its next job), or take another"
        )
    nodes = int(options.get("nodes") or 1)
    if partition.max_nodes is not None and nodes > partition.max_nodes:
        return (
            f"{nodes} nodes are asked for but partition '{partition.name}' has, or allows, "
            f"{partition.max_nodes}"
        )
    return ""


def _listed(known: Mapping[str, Partition]) -> str:
    names = sorted(known)
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
