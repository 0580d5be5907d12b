"""Which executors there are, what each one gets, and who this process is among them.

The only module of an executor that reads the launcher's environment (SLURM_*, MPI).

`detect()` is called once, at the start of an executor's rank. A process that our launcher did not
start (no LLAMARL_EXECUTOR in its environment) is always a world of one, even in a shell that
Slurm opened with SLURM_NTASKS=8.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from llamarl_hpc.errors import ExecutorFailed

if TYPE_CHECKING:  # status and logs of a login node do without pydantic
    from llamarl_hpc.config.schema import Config, ResourceConfig

MARKER = "LLAMARL_EXECUTOR"  # set by launch/steps.py for every rank it starts
ONE_HOST = "LLAMARL_ONE_HOST"  # "0" or "1", set by launch/srun.py: it alone knows the nodes

_COMMAND, _REPLY = 1, 2  # tags of MPI messages: from the leader, to the leader

_LEAVE_S = 60.0  # a rank whose work is done and that has not ended by then hangs

# What each launcher calls the number of ranks of this step; the first that is set is compared
# with MPI's own answer, so that an MPI that cannot talk to the launcher is noticed at once.
_SIZE_VARIABLES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE")


def role_of(executor: str) -> str:
    """`generator.1` -> `generator`."""
    return executor.partition(".")[0]


def executor_names(config: Config) -> list[str]:
    """All executors of a run, in the order in which they are started."""
    generators = [f"generator.{k}" for k in range(config.generator.replicas)]
    return ["trainer", *generators, "reward", *(["reference"] if refers_apart(config) else [])]


def refers_apart(config: Config) -> bool:
    """Whether the KL term's reference is an executor of its own."""
    return config.algorithm.beta > 0.0 and config.reference.placement == "executor"


def resources_of(config: Config, executor: str) -> ResourceConfig:
    resources: ResourceConfig = getattr(config.resources, role_of(executor))
    return resources


def device_of(config: Config, executor: str) -> str:
    """`cuda` when the executor asks for GPUs, else `cpu`."""
    return "cuda" if resources_of(config, executor).gpus_per_node else "cpu"


def is_one_host(config: Config) -> bool:
    """Whether trainer and generators share a machine. Job steps are told by their launcher; else
    parts that name a partition are taken for components of a Slurm job, on nodes of their own."""
    if told := os.environ.get(ONE_HOST):
        return told == "1"
    blocks = (config.resources.trainer, config.resources.generator)
    return all(block.nodes == 1 and block.partition is None for block in blocks)


def row_length(config: Config) -> int:
    """Tokens of the longest prompt with the longest completion."""
    return config.rollout.max_prompt_length + config.rollout.max_completion_length


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks of one executor. `comm` is its MPI communicator, None for a single process."""

    rank: int = 0  # executor rank
    size: int = 1
    local_rank: int = 0  # on this node
    local_size: int = 1
    host: str = field(default_factory=socket.gethostname)
    comm: Any = None
    node: Any = None  # communicator of the ranks on this node, where MPI was asked for it

    @property
    def is_leader(self) -> bool:
        """Rank 0: the only one that talks to the controller."""
        return self.rank == 0

    def bcast(self, value: Any, root: int = 0) -> Any:
        """The root's `value` on every rank. Small Python objects of our own only."""
        return value if self.comm is None else self.comm.bcast(value, root=root)

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """All ranks' values in rank order at the root, None elsewhere."""
        return [value] if self.comm is None else self.comm.gather(value, root=root)

    def allgather(self, value: Any) -> list[Any]:
        return [value] if self.comm is None else self.comm.allgather(value)

    def maximum(self, values: Any) -> Any:
        """Element by element over all ranks; a float32 array on each, all equally long."""
        if self.comm is None:
            return values
        from mpi4py import MPI

        found = values.copy()
        self.comm.Allreduce(values, found, op=MPI.MAX)
        return found

    def barrier(self) -> None:
        if self.comm is not None:
            self.comm.Barrier()

    def share(self, command: Any = None, *, meanwhile: Callable[[], None] | None = None) -> Any:
        """The leader's `command` on every rank; the others sleep while they wait for it, and call
        `meanwhile` now and then.

        MPI's own broadcast spins on a core, which the trainer's neighbours on a laptop need.
        """
        if self.comm is None or self.size == 1:
            return command
        if self.is_leader:
            for request in [
                self.comm.isend(command, dest=r, tag=_COMMAND) for r in range(1, self.size)
            ]:
                request.wait()
            return command
        pause_s = 0.0001  # a generator's ranks wait for the next token, a trainer's for minutes
        while not self.comm.Iprobe(source=0, tag=_COMMAND):
            if meanwhile is not None:
                meanwhile()
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.2, 0.01)
        return self.comm.recv(source=0, tag=_COMMAND)

    def reply(self, value: Any) -> None:
        """To the leader, which looks for `replies` when it likes. For ranks other than 0."""
        self.comm.send(value, dest=0, tag=_REPLY)

    def replies(self) -> list[Any]:
        """What the leader was sent since it last looked."""
        found: list[Any] = []
        while self.size > 1 and self.comm.Iprobe(tag=_REPLY):
            found.append(self.comm.recv(tag=_REPLY))
        return found

    def abort(self, code: int) -> None:
        """End every rank of this world at once, without waiting for anybody."""
        if self.comm is not None and self.size > 1:
            self.comm.Abort(code)
        os._exit(code)

    def leave(self) -> NoReturn:
        """End this rank, whose work is done, with exit code 0. All ranks must call it.

        Python's own teardown is skipped: a thread in C++ code or a handler of somebody's could
        turn it into a crash or a hang. The C library's is not: there MPICH tells its launcher that
        the rank has ended well; without it `mpiexec` kills those that have not ended yet.
        """
        faulthandler.dump_traceback_later(_LEAVE_S, exit=True)
        if self.comm is not None:
            from mpi4py import MPI

            MPI.Finalize()
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.PyDLL(None).exit(0)  # holds the GIL, so no other Python thread wakes up meanwhile
        os._exit(0)


def detect() -> World:
    """The world of this process. Raises ExecutorFailed when MPI and the launcher disagree."""
    if MARKER not in os.environ:
        return World()
    import mpi4py

    mpi4py.rc.finalize = False  # a rank that fails must not wait for the others in Finalize
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    announced = next((os.environ[v] for v in _SIZE_VARIABLES if v in os.environ), None)
    if announced is not None and int(announced) != comm.size:
        version = MPI.Get_library_version().splitlines()[0]
        raise ExecutorFailed(
            os.environ[MARKER],
            comm.rank,
            socket.gethostname(),
            f"the launcher started {announced} ranks but MPI sees {comm.size} ({version}); "
            "start it with the mpiexec of the MPI that mpi4py found; under Slurm set launch.mpi "
            "(pmix for Open MPI, pmi2 for MPICH; 'srun --mpi=list' shows what there is)",
        )
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    _unname_shared_memory()
    return World(
        rank=comm.rank,
        size=comm.size,
        local_rank=node.rank,
        local_size=node.size,
        comm=comm,
        node=node,
    )


def mpi_library() -> str:
    """First line of what the MPI behind mpi4py calls itself. MPI is loaded, not started."""
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    return " ".join(MPI.Get_library_version().splitlines()[0].split())


def step_rank(environ: Mapping[str, str]) -> int:
    """Rank of this process by its launcher, for when MPI cannot tell; 0 without one."""
    names = ("SLURM_PROCID", "PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK")
    return next((int(environ[name]) for name in names if name in environ), 0)


def _unname_shared_memory() -> None:
    """MPICH's file in /dev/shm stays behind when a rank is killed. By now every rank of the node
    has it mapped, and it is not opened again; without its name it goes with the last of them."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.split()[-1]
            if path.startswith("/dev/shm/mpich_shm_"):
                Path(path).unlink(missing_ok=True)


def lower_priority(nice: int) -> None:
    """Let others have the cores first. Linux may weigh whole sessions instead of processes, and
    every job step is a session of its own, so the session is told as well."""
    if nice == 0:
        return
    os.nice(nice)
    session = Path("/proc/self/autogroup")
    if session.exists():
        with contextlib.suppress(OSError):  # a container may forbid it
            session.write_text(f"{nice}")


def interface_address(interface: str | None = None) -> str:
    """IPv4 address of this host that others can reach; `interface` is a name or an address.

    Without an interface: the address by which the host's default route leaves, else 127.0.0.1.
    """
    if interface:
        import psutil

        for address in psutil.net_if_addrs().get(interface, []):
            if address.family == socket.AF_INET:
                return str(address.address)
        return interface
    probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        probe.connect(("10.255.255.255", 1))  # sends nothing: it only asks the routing table
        return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
    finally:
        probe.close()


def init_process_group(world: World, *, device: str, timeout_s: float = 600.0) -> None:
    """torch.distributed's default group over this executor's ranks: nccl on cuda, gloo on cpu.

    The rendezvous port is chosen by the system on rank 0 and travels over MPI, so two runs on a
    node never meet. DeepSpeed adopts the group; its own discovery is never used.
    """
    from datetime import timedelta

    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    timeout = timedelta(seconds=timeout_s)
    address = interface_address() if world.size > world.local_size else "127.0.0.1"
    store = None
    if world.is_leader:
        store = TCPStore(
            address, 0, world.size, is_master=True, wait_for_workers=False, timeout=timeout
        )
    host, port = world.bcast((address, store.port) if store else None)
    if store is None:
        store = TCPStore(host, port, world.size, is_master=False, timeout=timeout)
    os.environ.update(
        RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(world.local_rank),
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
    )
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout
    )
