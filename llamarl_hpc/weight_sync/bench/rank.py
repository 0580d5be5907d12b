"""One process of `llamarl-hpc bench weight-sync`: a trainer rank, a replica of one rank, or, with
`--ranks-per-replica`, another rank of a replica, which takes part only where those are measured."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
from torch._C._distributed_c10d import Backend

from llamarl_hpc.channels.messages import SyncMember
from llamarl_hpc.config.schema import WeightSyncConfig
from llamarl_hpc.placement import World, detect
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.weight_sync.arena import torch_dtype
from llamarl_hpc.weight_sync.base import StagedWeights, WeightPublisher, WeightReceiver
from llamarl_hpc.weight_sync.bench.ends import HOST, TIMEOUT_S, make_publisher, make_receiver
from llamarl_hpc.weight_sync.bench.replica import ReplicaWay
from llamarl_hpc.weight_sync.bench.task import Answer, Round, Task, model_specs, transports
from llamarl_hpc.weight_sync.bench.weights import MadeUpWeights
from llamarl_hpc.weight_sync.collective.group import broadcast, make_group
from llamarl_hpc.weight_sync.shared_memory.manifest import read_manifest

_POLL_S = 0.0005


class Bench:
    """What one rank keeps between rounds."""

    def __init__(self, task: Task, everybody: World) -> None:
        self.task, self.everybody = task, everybody
        self.is_trainer = everybody.rank < task.trainers
        behind = everybody.rank - task.trainers
        replica = -1 if self.is_trainer else behind % task.generators
        comm = everybody.comm.Split(1 + replica, everybody.rank)
        self.world = World(
            rank=comm.rank, size=comm.size, local_rank=comm.rank, comm=comm, node=comm
        )
        self.number = replica if comm.rank == 0 else -1  # of the replica that is this process
        self.specs = model_specs(task.size, task.dtype, task.parameters)
        self.num_bytes = sum(s.numel * torch_dtype(s.dtype).itemsize for s in self.specs)
        self.source: MadeUpWeights | None = None
        self.copy: list[torch.Tensor] = []  # a trainer's own copy; what an engine would hold
        self.others: list[torch.Tensor] = []  # a replica's own copy of that
        if self.is_trainer:
            self.source = MadeUpWeights(
                self.specs, comm.rank, comm.size, sharded=task.zero_stage == 3
            )
            self.copy = [torch.empty_like(part).zero_() for part in self.source.parts()]
        elif self.is_replica:
            self.copy = [torch.zeros(s.shape, dtype=torch_dtype(s.dtype)) for s in self.specs]
            self.others = [torch.zeros_like(tensor) for tensor in self.copy]
        self.publishers: dict[str, WeightPublisher] = {}
        self.receivers: dict[str, WeightReceiver] = {}
        self.addresses: dict[str, str] = {}
        self.added: dict[str, int] = {}  # bytes of this process
        self.sent: dict[str, int] = {}  # bytes of a version
        self.int8_copy: list[torch.Tensor] = []  # what an engine with int8 weights would hold
        self.transports = transports(task.quantization)
        for way in self.transports:
            self._connect(way)
        self.groups = self._make_groups()
        self.raw = self._raw_memory()
        self.version = 0
        self.wide: ReplicaWay | None = None
        if task.ranks_per_replica > 1:
            self.wide = ReplicaWay(
                config=WeightSyncConfig(verify="off", timeout_s=TIMEOUT_S),
                everybody=everybody,
                world=self.world,
                source=self.source,
                replicas=task.generators,
                number=replica,
            )

    @property
    def is_replica(self) -> bool:
        return self.number >= 0

    # ------------------------------------------------------------------ set-up

    def _connect(self, way: str) -> None:
        transport, before = self.transports[way], _private_bytes()
        run = RunDir(Path(self.task.folder) / way)
        if self.everybody.is_leader:
            RunDir.create_at(run.path)
        self.meet()
        if self.source is not None:
            self.publishers[way] = make_publisher(transport, run, self.world, self.source)
        elif self.is_replica:
            self.receivers[way] = make_receiver(transport, run, self.number)
        address = self.publishers[way].store_address if self.is_trainer else None
        self.addresses[way] = self.everybody.bcast(address)
        self.added[way] = max(_private_bytes() - before, 0)

    def _make_groups(self) -> dict[str, Backend]:
        """ "gather": the trainer ranks; "0", "1", ...: a trainer rank and all replicas."""
        address, task = self.addresses["collective"], self.task
        places: dict[str, list[int]] = {"gather": list(range(task.trainers))}
        replicas = range(task.trainers, task.trainers + task.generators)
        for rank in range(task.trainers):
            places[f"{rank}"] = [rank, *replicas]
        return {
            name: make_group(
                store_address=address,
                name=f"bench/{name}",
                rank=ranks.index(self.everybody.rank),
                size=len(ranks),
                device="cpu",
                own_address=HOST,
                timeout_s=TIMEOUT_S,
            )
            for name, ranks in places.items()
            if self.everybody.rank in ranks
        }

    def _raw_memory(self) -> dict[str, torch.Tensor]:
        """As much for every sender as it really sends; written, as it would else be one page of
        zeros that never leaves the processor's cache."""
        share = -(-self.num_bytes // self.task.trainers)
        return {
            name: torch.ones(share, dtype=torch.uint8) for name in self.groups if name != "gather"
        }

    def meet(self) -> None:
        """A barrier that leaves the cores to others."""
        request = self.everybody.comm.Ibarrier()
        while not request.Test():
            time.sleep(_POLL_S)

    # ------------------------------------------------------------------ the ways

    def time(self, work: Callable[[], Any]) -> float:
        """Seconds from the first rank that began until the last one that was done. All ranks'
        clocks are this machine's."""
        self.meet()
        start = time.monotonic()
        work()
        end = time.monotonic()
        self.meet()
        spans = self.everybody.allgather((start, end))
        return float(max(end for _, end in spans) - min(start for start, _ in spans))

    def copy_alone(self) -> None:
        if self.source is not None:
            for target, part in zip(self.copy, self.source.parts(), strict=True):
                target.copy_(part)

    def sync(self, way: str, replicas: int) -> tuple[float, float]:
        """Seconds in all, and of the trainer's stall."""
        staged: StagedWeights | None = None
        stall = 0.0
        self._train(way)

        def work() -> None:
            nonlocal stall, staged
            stall = self._begin(way, replicas)
            while self._takes_part(replicas) and (staged := self.receivers[way].poll()) is None:
                time.sleep(_POLL_S)

        seconds = self.time(work)
        if staged is not None:
            self._load(way, staged)
        return seconds, max(self.everybody.allgather(stall))

    def in_flight(self, way: str) -> tuple[float, float, float]:
        """Of the slowest replica, which decodes meanwhile: seconds between the last step on the
        old weights and the first on the new ones, of a step (median), and of a plain copy."""
        self._train(way)
        self.meet()
        start = time.monotonic()
        if self.is_replica:
            for target, tensor in zip(self.others, self.copy, strict=True):
                target.copy_(tensor)
        copy = time.monotonic() - start
        self.meet()
        self._begin(way, self.task.generators)
        steps, pause = [], 0.0
        while self.is_replica and not pause:
            start = time.monotonic()
            self._decode()
            end = time.monotonic()
            steps.append(end - start)
            if (staged := self.receivers[way].poll()) is not None:
                self._load(way, staged)
                pause = time.monotonic() - end
        self.meet()  # asleep: a collective would spin on a core that decoding needs
        mine = (pause, median(steps or [0.0]), copy)
        found: list[tuple[float, float, float]] = self.everybody.allgather(mine)
        return max(found[self.task.trainers :][: self.task.generators])

    def _train(self, way: str) -> None:
        """The next version. It need not differ where everything is sent anyway."""
        self.version += 1
        if self.source is not None and way == "collective_delta":
            self.source.step(self.version)

    def _begin(self, way: str, replicas: int) -> float:
        """Publish, or ask for, the version; the trainer's stall."""
        members = [SyncMember(executor=f"generator.{k}") for k in range(replicas)]
        if self.source is not None:
            receipt = self.publishers[way].publish(self.version, replicas, members)
            self.sent[way] = receipt.num_bytes
            return receipt.seconds
        if self._takes_part(replicas):
            self.receivers[way].start(self.version, replicas, members, self.addresses[way])
        return 0.0

    def _takes_part(self, replicas: int) -> bool:
        return self.is_replica and self.number < replicas

    def _load(self, way: str, staged: StagedWeights) -> None:
        """As an engine does."""
        tensors, targets = [tensor for _, tensor in staged.tensors()], self.copy
        if self.transports[way].is_int8:
            self.int8_copy = self.int8_copy or [torch.empty_like(tensor) for tensor in tensors]
            targets = self.int8_copy
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor)
        staged.release()

    def _decode(self) -> None:
        """What one decoding step reads: every weight once."""
        for tensor in self.copy:
            if tensor.dim() == 2:
                torch.mv(tensor, torch.ones(tensor.shape[1], dtype=tensor.dtype))

    def sync_wide(self, way: ReplicaWay) -> float:
        """Seconds until every rank of every replica may read the version."""
        self.version += 1
        seconds = self.time(lambda: way.sync(self.version))
        way.release()
        return seconds

    def raw_broadcast(self) -> None:
        works = [broadcast(self.groups[name], memory) for name, memory in self.raw.items()]
        for work in works:
            work.wait()

    def gather_broadcast(self) -> None:
        """As systems do that send from one rank: one parameter after the other."""
        if self.is_replica:
            for tensor in self.copy:
                broadcast(self.groups["0"], tensor).wait()
        if not self.is_trainer:
            return
        for _, whole in self._gathered():
            if self.everybody.is_leader:
                broadcast(self.groups["0"], whole).wait()

    def disk(self) -> None:
        from safetensors.torch import load_file, save_file

        path = Path(self.task.folder) / f"{self.version}.safetensors"
        if self.is_trainer:
            whole = dict(self._gathered())
            if self.everybody.is_leader:
                save_file(whole, path.with_suffix(".part"))
                path.with_suffix(".part").rename(path)
        if not self.is_replica:
            return
        while not path.exists():
            time.sleep(_POLL_S)
        for target, tensor in zip(self.copy, load_file(path).values(), strict=False):
            target.view(-1)[: tensor.numel()].copy_(tensor.view(-1)[: target.numel()])

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter whole on every trainer rank, one at a time (ZeRO-3's gather)."""
        source, size = self.source, self.world.size
        assert source is not None
        for spec in self.specs:
            held = source.owned_range(spec.name)
            if held is None or size == 1:
                yield spec.name, source.read(spec.name, 0, spec.numel).view(spec.shape)
                continue
            shard = torch.zeros(-(-spec.numel // size), dtype=torch_dtype(spec.dtype))
            shard[: held[1] - held[0]] = source.read(spec.name, *held)
            parts = torch.empty(size * len(shard), dtype=shard.dtype)
            gather: Any = self.groups["gather"]
            gather.allgather([list(parts.chunk(size))], [shard]).wait()
            yield spec.name, parts[: spec.numel].view(spec.shape)

    # ------------------------------------------------------------------ rounds

    def round(self) -> Round:
        seconds = {"copy": self.time(self.copy_alone)}
        stall: dict[str, float] = {}
        pause: dict[str, tuple[float, float, float]] = {}
        by_replicas: dict[str, float] = {}
        replicas = 1
        while replicas < self.task.generators:
            by_replicas[f"{replicas}"] = self.sync("shared_memory", replicas)[0]
            replicas *= 2
        for way in self.transports:
            seconds[way], stall[way] = self.sync(way, self.task.generators)
        for way in ("shared_memory_verified", "collective_verified"):
            pause[way] = self.in_flight(way)
        by_replicas[f"{self.task.generators}"] = seconds["shared_memory"]
        seconds["raw_broadcast"] = self.time(self.raw_broadcast)
        seconds["gather_broadcast"] = self.time(self.gather_broadcast)
        seconds["disk"] = self.time(self.disk)
        if self.everybody.is_leader:
            (Path(self.task.folder) / f"{self.version}.safetensors").unlink()
        wide = None if self.wide is None else self.sync_wide(self.wide)
        return Round(seconds=seconds, stall=stall, pause=pause, by_replicas=by_replicas, wide=wide)

    def collective_memory(self) -> int:
        """Bytes that the collective transport and its first transfer added to this process."""
        before = _private_bytes()
        self.sync("collective", self.task.generators)
        return self.added["collective"] + max(_private_bytes() - before, 0)

    def close(self) -> None:
        self.meet()
        if self.wide is not None:
            self.wide.close()
        for publisher in self.publishers.values():
            publisher.close()
        for receiver in self.receivers.values():
            receiver.close()
        self.meet()


def _private_bytes() -> int:
    """Resident memory of this process that is neither a file nor shared."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def main() -> None:
    torch.set_num_threads(1)
    task = msgspec.json.decode(sys.argv[1], type=Task)
    everybody = detect()
    bench = Bench(task, everybody)
    memory = everybody.allgather((bench.is_trainer, bench.collective_memory()))
    bench.round()  # the first one warms up
    rounds = [bench.round() for _ in range(task.rounds)]
    manifest = read_manifest(RunDir(Path(task.folder) / "shared_memory"))
    assert manifest is not None
    bench.close()
    if everybody.is_leader:
        answer = Answer(
            num_bytes=bench.num_bytes,
            rounds=rounds,
            trainer_memory=max(m for is_trainer, m in memory if is_trainer),
            generator_memory=max(m for is_trainer, m in memory if not is_trainer),
            shared_bytes=manifest.shape.file_bytes,
            int8_bytes=bench.sent.get("collective_int8", 0),
        )
        part = Path(task.folder) / "answer.part"
        part.write_bytes(msgspec.json.encode(answer))
        part.rename(part.with_suffix(".json"))
    everybody.leave()


if __name__ == "__main__":
    main()
