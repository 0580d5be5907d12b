"""One rank of a probe: `python -m llamarl_hpc.launch.doctor.probe SPEC`, started like an executor.

Looks around (`Facts`), forms its MPI world, reads what the controller writes into the shared
folder, and lets the leaders of all roles talk to each other. What it saw goes to its standard
output, as one marked line of JSON: the folder itself may be what is broken. The first line is
written before MPI starts, because MPI may end the process.

    leader: hello file -> waits for the other leaders' -> measures each line once
    other ranks: wait for MPI's start, and at the end for their leader
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import msgspec

from llamarl_hpc.errors import ExecutorFailed
from llamarl_hpc.launch.doctor.network import Peer, ask_time, measure
from llamarl_hpc.placement import World, detect, interface_address, step_rank
from llamarl_hpc.storage.atomic import write_text
from llamarl_hpc.weight_sync.shared_memory.segment import remove_stale

MARK = "LLAMARL_PROBE "
PULSE = "pulse.json"
_PACKAGES = ["llamarl-hpc", "torch", "deepspeed", "mpi4py", "h5py"]
_PACKAGES += ["nvidia-nccl-cu12", "nvidia-nccl-cu13"]
_POLL_S = 0.05


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe is told."""

    role: str
    folder: str  # shared
    token: str
    controller: tuple[str, int]  # address and port of its peer
    roles: list[str]  # whose leaders are measured
    interface: str | None
    files: list[str]  # that this role reads
    gpus: int  # of a node, that the config asks for
    patience_s: float  # for the controller's file, and for a peer to answer
    meet_s: float  # for all leaders to have started, from the start of this one


class Pulse(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller writes into the folder again and again."""

    token: str
    time: float  # of the epoch, by the controller's clock


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """Where a leader's peer answers."""

    address: str
    port: int


class Report(msgspec.Struct, kw_only=True):
    """What a rank saw. Values of what was not reached stay as they are here."""

    role: str
    rank: int
    host: str
    pid: int = 0
    resolves: bool = False  # this host's own name
    affinity: list[int] = []
    open_files: int = 0  # soft limit; -1: none
    locked_memory: int = 0  # bytes; -1: no limit
    shm_free: int = 0  # bytes
    versions: dict[str, str] = {}
    offline: bool = False
    missing_files: list[str] = []
    gpus: list[str] = []  # name and driver
    gpu_problem: str = ""
    is_final: bool = False
    size: int = 0  # of the MPI world; 0: MPI did not start
    mpi_problem: str = ""
    folder_age_s: float | None = None  # of the controller's last writing; None: never seen
    clock_s: float | None = None  # the controller's clock is ahead by so much
    network_problems: dict[str, str] = {}  # by the other side's role
    speeds: dict[str, float] = {}  # MB/s, by the other side's role
    wrote: bool = False  # the leader left a file for the controller
    seconds: float = 0.0


def main(argv: list[str]) -> None:
    """Never returns normally."""
    start = time.monotonic()
    spec = msgspec.json.decode(argv[0], type=Spec)
    report = look_around(spec, step_rank(os.environ))
    _say(report)
    report.folder_age_s = _pulse_age(spec)
    world = World()
    try:
        world = detect()
        report.rank, report.size = world.rank, world.size
    except ExecutorFailed as error:
        report.mpi_problem = error.reason
    is_leader = world.is_leader and not report.mpi_problem
    _talk(spec, report, is_leader=is_leader, end=start + spec.meet_s)
    report.is_final, report.seconds = True, time.monotonic() - start
    _say(report)
    world.share("done")  # others sleep here, and not in MPI's end, which is short of patience
    world.leave()


def measured(role: str) -> str:
    """File by which the leader of a role says that it has measured its lines."""
    return f"{role}.measured"


def gone(role: str) -> str:
    """File by which the controller says that the step of a role has ended."""
    return f"{role}.gone"


def look_around(spec: Spec, rank: int) -> Report:
    """All that can be seen without MPI."""
    gpus, problem = find_gpus() if spec.gpus else ([], "")
    remove_stale()  # as the run will do, before it wants room there
    return Report(
        role=spec.role,
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        resolves=_resolves(socket.gethostname()),
        affinity=sorted(os.sched_getaffinity(0)),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        shm_free=_free("/dev/shm"),
        versions=versions(),
        offline=os.environ.get("HF_HUB_OFFLINE") == "1",
        missing_files=[path for path in spec.files if not Path(path).exists()],
        gpus=gpus,
        gpu_problem=problem,
    )


def versions() -> dict[str, str]:
    """Of Python and the packages that must agree; a package that is not there is left out."""
    found = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def find_gpus() -> tuple[list[str], str]:
    """Names with drivers, and why there are none. Asks the driver's own program, not torch."""
    if program := shutil.which("nvidia-smi"):
        argv = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    elif program := shutil.which("rocm-smi"):
        argv = [program, "--showproductname", "--csv"]
    else:
        return [], "neither nvidia-smi nor rocm-smi is there"
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"{program} does not answer ({error})"
    if done.returncode:
        return [], " ".join((done.stderr or done.stdout).split())[:200]
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return [line for line in lines if not line.startswith("device,")], ""


# ------------------------------------------------------------------ with others


def _pulse_age(spec: Spec) -> float | None:
    """Seconds since the controller wrote what is read here; None if nothing of it is seen."""
    path, end = Path(spec.folder) / PULSE, time.monotonic() + spec.patience_s
    while time.monotonic() < end:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            pulse = msgspec.json.decode(path.read_bytes(), type=Pulse)
            if pulse.token == spec.token:
                return time.time() - pulse.time
        time.sleep(_POLL_S)
    return None


def _talk(spec: Spec, report: Report, *, is_leader: bool, end: float) -> None:
    try:
        report.clock_s = ask_time(*spec.controller, spec.token, spec.patience_s)
    except OSError as error:
        report.network_problems["controller"] = _why(error, *spec.controller)
    if not is_leader:
        return
    hello = Path(spec.folder) / f"{spec.role}.hello.json"
    peer = Peer(spec.token)
    try:
        mine = Hello(address=interface_address(spec.interface), port=peer.port)
        write_text(hello, msgspec.json.encode(mine).decode())
    except OSError as error:
        report.network_problems["folder"] = f"{hello} cannot be written: {error.strerror}"
    _measure_lines(spec, report, end)
    with contextlib.suppress(OSError):
        write_text(Path(spec.folder) / measured(spec.role), "")
        report.wrote = True
    _wait_for_the_others(spec, end)
    peer.close()


def _measure_lines(spec: Spec, report: Report, end: float) -> None:
    """To the controller, and to the leaders of roles whose name comes after ours."""
    lines: dict[str, tuple[str, int] | None] = {"controller": spec.controller}
    for role in spec.roles:
        if role > spec.role:
            lines[role] = _hello_of(role, spec, end)
    for role, place in lines.items():
        if place is None:
            report.network_problems[role] = "its ranks have not started"
            continue
        try:
            report.speeds[role] = measure(*place, spec.token, spec.patience_s)
        except OSError as error:
            report.network_problems[role] = _why(error, *place)


def _hello_of(role: str, spec: Spec, end: float) -> tuple[str, int] | None:
    """Where the leader of a role answers; None when its step has ended, or at `end`."""
    path, left = Path(spec.folder) / f"{role}.hello.json", Path(spec.folder) / gone(role)
    is_last = False
    while not is_last:
        is_last = left.exists() or time.monotonic() > end  # a hello may have come before
        with contextlib.suppress(OSError, msgspec.DecodeError):
            hello = msgspec.json.decode(path.read_bytes(), type=Hello)
            return hello.address, hello.port
        time.sleep(_POLL_S)
    return None


def _wait_for_the_others(spec: Spec, end: float) -> None:
    """Stay until those that measure the line to us have done so, or cannot."""
    folder = Path(spec.folder)
    waiting = [role for role in spec.roles if role < spec.role]
    while waiting and time.monotonic() < end:
        waiting = [
            role
            for role in waiting
            if not (folder / measured(role)).exists() and not (folder / gone(role)).exists()
        ]
        time.sleep(_POLL_S)


# ------------------------------------------------------------------ small things


def _say(report: Report) -> None:
    # one write: ranks share their launcher's output
    os.write(1, f"{MARK}{msgspec.json.encode(report).decode()}\n".encode())


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True


def _free(path: str) -> int:
    try:
        stats = os.statvfs(path)
    except OSError:
        return 0
    return stats.f_bavail * stats.f_frsize


def _why(error: OSError, host: str, port: int) -> str:
    return f"{host}:{port}: {error.strerror or error}"


if __name__ == "__main__":
    main(sys.argv[1:])
