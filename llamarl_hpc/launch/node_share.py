"""What a component asks of each of its nodes, against the kinds of nodes that a partition has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llamarl_hpc.launch.script import Options
from llamarl_hpc.slurm_text.memory import parse_memory
from llamarl_hpc.slurm_text.node_kinds import NodeKind


@dataclass(frozen=True, kw_only=True)
class NodeShare:
    """Of one node; 0 where nothing is asked for, or all that there is."""

    cores: int
    memory_mib: float
    gpus: int
    gpu_type: str  # in small letters; empty: any

    @classmethod
    def of(cls, options: Options) -> NodeShare:
        """From sbatch's long options, as `request.py` writes them."""
        ranks = int(options.get("ntasks-per-node") or 1)
        cores = ranks * int(options.get("cpus-per-task") or 1)
        kind, gpus = _gpus(options, ranks)
        memory = [
            _mib(options, "mem"),
            _mib(options, "mem-per-cpu") * cores,
            _mib(options, "mem-per-gpu") * gpus,
        ]
        free = "overcommit" in options  # ranks share cores
        return cls(cores=0 if free else cores, memory_mib=max(memory), gpus=gpus, gpu_type=kind)

    def misfit(self, kinds: Sequence[NodeKind], max_cores: int | None = None) -> str:
        """Why no node has it, in words; empty when one does or none is known. `max_cores`: what the
        partition allows of one node."""
        if max_cores is not None and self.cores > max_cores:
            return f"{self.cores} cores of a node are asked for but it allows {max_cores}"
        return "" if not kinds or any(self._fits(kind) for kind in kinds) else self._words(kinds)

    def _fits(self, kind: NodeKind) -> bool:
        small = self.cores <= kind.cores and self.memory_mib <= kind.memory_mib
        return small and self.gpus <= self._gpus_of(kind)

    def _words(self, kinds: Sequence[NodeKind]) -> str:
        found = list(self._shortages(kinds))
        if found:
            return "; ".join(found)
        return f"no kind of node there has all that is asked of one: {self}"

    def _shortages(self, kinds: Sequence[NodeKind]) -> Iterator[str]:
        cores, memory = max(k.cores for k in kinds), max(k.memory_mib for k in kinds)
        if self.cores > cores:
            yield f"{self.cores} cores of a node are asked for but its nodes have {cores} at most"
        if self.memory_mib > memory:
            asked = f"{self.memory_mib:.0f} MiB of a node"
            yield f"{asked} are asked for but its nodes have {memory} at most"
        types = sorted({kind for node in kinds for kind in node.gpus if kind})
        if self.gpu_type and self.gpu_type not in types:
            there = f"those of type {', '.join(types)}" if types else "none with a type"
            yield f"GPUs of type {self.gpu_type} are asked for but there are {there}"
        elif self.gpus > (most := max(self._gpus_of(k) for k in kinds)):
            yield f"{self.gpus} GPUs of a node are asked for but its nodes have {most} at most"

    def _gpus_of(self, kind: NodeKind) -> int:
        return kind.gpus.get(self.gpu_type, 0) if self.gpu_type else kind.num_gpus

    def __str__(self) -> str:
        gpus = f", {self.gpus} GPUs" if self.gpus else ""
        return f"{self.cores} cores, {self.memory_mib:.0f} MiB{gpus}"


def _gpus(options: Options, ranks: int) -> tuple[str, int]:
    """Type and number on a node."""
    for name, factor in (("gpus-per-node", 1), ("gpus-per-task", ranks)):
        if text := options.get(name):
            kind, _, number = str(text).rpartition(":")
            return kind.lower(), int(number) * factor if number.isdigit() else 0
    for entry in str(options.get("gres") or "").split(","):
        name, *rest = entry.split(":")
        if name == "gpu" and rest and rest[-1].isdigit():
            return ":".join(rest[:-1]).lower(), int(rest[-1])
    return "", 0


def _mib(options: Options, name: str) -> float:
    memory = parse_memory(str(options[name])) if options.get(name) else None
    return memory.mib if memory is not None else 0.0
