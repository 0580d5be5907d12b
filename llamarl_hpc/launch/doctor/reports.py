"""From what all ranks saw to findings. Pure: values in, values out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from llamarl_hpc.launch.doctor.finding import Finding, fail, ok, warn
from llamarl_hpc.launch.doctor.probe import Report
from llamarl_hpc.launch.doctor.shared_memory import Need

_SLOW_FOLDER_S = 5.0
_SKEW_S = 1.0
_SLOW_MB_S = 50.0
_FEW_FILES = 1024
# a pair of roles that never talk to each other in a run
_IDLE_LINES = {frozenset({"generator", "reward"}), frozenset({"trainer", "reward"})}


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the config asks of a role's probe."""

    ranks: int
    cpus: int  # of a rank
    gpus: int  # of a node
    is_real: bool  # as many ranks, bound as in the run; else more, sharing cores, to try MPI
    shm: Need | None = None  # what weights take of /dev/shm on its nodes


@dataclass(frozen=True, kw_only=True)
class Step:
    """How the probe of a role ended, and what its ranks said last."""

    reports: Sequence[Report]  # the newest of every rank
    returncode: int | None  # None: it was ended after the deadline
    words: str  # what else was printed


Steps = Mapping[str, Step]  # by role


def judge(steps: Steps, expected: Mapping[str, Expected]) -> list[Finding]:
    """All findings about the ranks of all roles."""
    checks: list[Callable[[Steps, Mapping[str, Expected]], Iterator[Finding]]] = [
        _started,
        _mpi,
        _folder,
        _network,
        _clock,
        _affinity,
        _files,
        _gpus,
        _shared_memory,
        _limits,
        _versions,
    ]
    return [finding for check in checks for finding in check(steps, expected)]


def _all(steps: Steps) -> list[Report]:
    return [report for step in steps.values() for report in step.reports]


def _started(steps: Steps, expected: Mapping[str, Expected]) -> Iterator[Finding]:
    for role, step in steps.items():
        ranks = expected[role].ranks
        if len(step.reports) < ranks:
            yield fail(
                "steps",
                f"{role}: {len(step.reports)} of {ranks} ranks started ({_ending(step)})",
                "see the words of the launcher; launch.extra_args, launch.mpi and resources make "
                "its command line",
            )
    if all(len(steps[role].reports) >= expected[role].ranks for role in steps):
        yield ok("steps", f"a step started in {', '.join(steps)}")


def _mpi(steps: Steps, expected: Mapping[str, Expected]) -> Iterator[Finding]:
    problems: dict[str, list[str]] = defaultdict(list)  # roles by problem
    sizes = {}
    for role, step in steps.items():
        if not step.reports:
            continue
        dead = sum(not r.is_final for r in step.reports)
        said = next((r.mpi_problem for r in step.reports if r.mpi_problem), "")
        if dead:
            said = f"{dead} of {len(step.reports)} ranks ended while MPI started ({_ending(step)})"
        if said:
            problems[said].append(role)
        else:
            sizes[role] = step.reports[0].size
    for said, roles in problems.items():
        yield fail(
            "mpi",
            f"{' and '.join(roles)}: {said.partition(';')[0]}",
            "set launch.mpi to what starts this MPI ('srun --mpi=list' shows what there is): "
            "pmix for Open MPI, pmi2 for MPICH",
        )
    if sizes and len(sizes) == len(steps):
        shown = ", ".join(f"{role} {size}" for role, size in sizes.items())
        yield ok("mpi", f"one MPI world for each role, of this many ranks: {shown}", **sizes)


def _folder(steps: Steps, expected: Mapping[str, Expected]) -> Iterator[Finding]:
    final = [r for r in _all(steps) if r.is_final]
    blind = sorted({r.role for r in final if r.folder_age_s is None})
    mute = {r.role: r.network_problems["folder"] for r in final if "folder" in r.network_problems}
    if blind:
        hosts = ", ".join(sorted({r.host for r in final if r.folder_age_s is None}))
        yield fail(
            "shared_folder",
            f"{' and '.join(blind)} on {hosts} cannot see what the controller writes into the run "
            "folder",
            "choose a folder that all nodes share (runs_dir, or --run-dir); in a container it must "
            "be bound (launch.container.command)",
        )
    elif mute:
        sentence = "; ".join(f"{role}: {problem}" for role, problem in mute.items())
        yield fail("shared_folder", sentence, "make the run folder writable on all nodes")
    elif final:
        # the age of what was read, less what the clocks differ by
        ages = [(r.folder_age_s or 0.0) + (r.clock_s or 0.0) for r in final]
        age = max(0.0, *ages)
        if age > _SLOW_FOLDER_S:
            yield warn(
                "shared_folder",
                f"files of the controller are seen {age:.1f} s late on other nodes",
                "choose another file system if the run waits often (attributes are cached there)",
                seen_after_s=age,
            )
        else:
            yield ok("shared_folder", f"all see the run folder, within {age:.2f} s")


def _network(steps: Steps, expected: Mapping[str, Expected]) -> Iterator[Finding]:
    speeds: dict[str, float] = {}
    broken = 0
    for report in _all(steps):
        for other, speed in report.speeds.items():
            speeds[f"{report.role}-{other}"] = speed
        for other, problem in report.network_problems.items():
            if other == "folder":
                continue
            broken += 1
            idle = frozenset({report.role, other}) in _IDLE_LINES
            yield (warn if idle else fail)(
                "network",
                f"{report.role} on {report.host} cannot reach {other}: {problem}",
                "set channels.interface to a network that all nodes share",
            )
    unnamed = sorted({r.host for r in _all(steps) if not r.resolves})
    if unnamed:
        yield warn(
            "host_names",
            f"{', '.join(unnamed)} cannot look up its own name",
            "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in launch.env",
        )
    if speeds and not broken:
        slowest = min(speeds, key=lambda pair: speeds[pair])
        figures = {pair: round(speed, 1) for pair, speed in speeds.items()}
        sentence = f"all reach one another; slowest {slowest} with {speeds[slowest]:.0f} MB/s"
        if speeds[slowest] < _SLOW_MB_S:
            advice = "set channels.interface to the fast network"
            yield warn("network", sentence, advice, mb_per_s=figures)
        else:
            yield ok("network", sentence, mb_per_s=figures)


def _clock(steps: Steps, expected: Mapping[str, Expected]) -> Iterator[Finding]:
    skews = {r.host: r.clock_s for r in _all(steps) if r.clock_s is not None}
    if not skews:
        return
    host = max(skews, key=lambda name: abs(skews[name]))
    off = abs(skews[host])
    if off > _SKEW_S:
        yield warn(
            "clock",
            f"the clock of {host} differs by {off:.1f} s from the controller's",
            "tell the site; times in traces and logs will not fit together",
            skew_s=off,
        )
    else:
        yield ok("clock", f"clocks agree within {max(off, 0.001):.3f} s", skew_s=off)


def _affinity(steps: Steps, expected: Mapping[str, Expected]) -> Iterator[Finding]:
    found = False
    for role, step in steps.items():
        wanted, by_host = expected[role], defaultdict(list)
        for report in step.reports:
            by_host[report.host].append(report)
        for host, reports in by_host.items():
            least = min(len(r.affinity) for r in reports)
            if least < wanted.cpus:
                found = True
                yield warn(
                    "affinity",
                    f"a rank of {role} on {host} may use {least} cores but "
                    f"resources.{role}.cpus_per_task is {wanted.cpus}",
                    "raise cpus_per_task of the request, or see launch.cpu_bind",
                )
            shared = _overlap(reports) if wanted.is_real else 0
            if shared and not _unbound(reports):
                found = True
                yield warn(
                    "affinity",
                    f"ranks of {role} on {host} share {shared} cores",
                    "set launch.cpu_bind to cores",
                )
    if not found and _all(steps):
        yield ok("affinity", "every rank has the cores it asked for")


def _overlap(reports: Sequence[Report]) -> int:
    pairs = combinations(reports, 2)
    return max((len(set(a.affinity) & set(b.affinity)) for a, b in pairs), default=0)


def _unbound(reports: Sequence[Report]) -> bool:
    """All have all cores: nobody binds here, which is not a wrong binding."""
    return len({tuple(r.affinity) for r in reports}) == 1 and len(reports) <= len(
        reports[0].affinity
    )


def _files(steps: Steps, expected: Mapping[str, Expected]) -> Iterator[Finding]:
    missing = {(r.role, path) for r in _all(steps) for path in r.missing_files}
    for role, path in sorted(missing):
        yield fail(
            "files",
            f"{role} does not find {path}",
            "put it where all nodes see it; in a container it must be bound",
        )
    online = sorted({r.role for r in _all(steps) if not r.offline})
    if online:
        yield warn(
            "offline",
            f"HF_HUB_OFFLINE is not 1 for {' and '.join(online)}",
            "remove it from launch.env: compute nodes would wait for the internet",
        )
    if not missing and not online and _all(steps):
        yield ok("files", "model and reward files are there; nothing will be downloaded")


def _gpus(steps: Steps, expected: Mapping[str, Expected]) -> Iterator[Finding]:
    wanted = {role: e.gpus for role, e in expected.items() if e.gpus and role in steps}
    if not wanted:
        yield ok("gpus", "not checked: no executor asks for GPUs")
    for role, number in wanted.items():
        for report in steps[role].reports:
            if len(report.gpus) < number:
                why = report.gpu_problem or f"there are {len(report.gpus)}"
                yield fail(
                    "gpus",
                    f"{role} on {report.host} wants {number} GPU(s) but {why}",
                    "see resources and the driver of that node",
                )
                return
        names = sorted({name for r in steps[role].reports for name in r.gpus})
        yield ok("gpus", f"{role}: {', '.join(names)}")


def _shared_memory(steps: Steps, expected: Mapping[str, Expected]) -> Iterator[Finding]:
    wanted = {role: e.shm for role, e in expected.items() if e.shm is not None}
    for role, need in wanted.items():
        reports = steps[role].reports if role in steps else []
        if not reports:
            continue
        least = min(reports, key=lambda report: report.shm_free)
        has = f"/dev/shm of {least.host} has {least.shm_free >> 20:,} MiB free"
        sentence = f"{has} but {need.what} need {(need.num_bytes >> 20) + 1:,} MiB"
        if least.shm_free >= need.num_bytes:
            yield ok("shared_memory", f"{has}, enough for {need.what}")
        elif need.is_fatal:
            yield fail("shared_memory", sentence, f"enlarge it, or set {need.way_out}")
        else:
            yield warn(
                "shared_memory", sentence, f"enlarge it, or the run goes on with {need.way_out}"
            )


def _limits(steps: Steps, expected: Mapping[str, Expected]) -> Iterator[Finding]:
    reports = _all(steps)
    few = [r for r in reports if 0 <= r.open_files < _FEW_FILES]
    for report in few[:1]:
        yield warn(
            "limits",
            f"{report.role} on {report.host} may open {report.open_files} files",
            "put 'ulimit -n 4096' into launch.setup",
        )
    locked = [r for r in reports if expected[r.role].gpus and r.locked_memory >= 0]
    for report in locked[:1]:
        yield warn(
            "limits",
            f"{report.role} on {report.host} may lock {report.locked_memory >> 20:,} MiB of memory",
            "InfiniBand and GPUs want 'ulimit -l unlimited'; tell the site",
        )
    if reports and not few and not locked:
        yield ok("limits", "limits on open files and locked memory are high enough")


def _versions(steps: Steps, expected: Mapping[str, Expected]) -> Iterator[Finding]:
    reports = _all(steps)
    found = False
    for package in sorted({name for r in reports for name in r.versions}):
        seen = {r.role: r.versions.get(package, "none") for r in reports}
        if len(set(seen.values())) > 1:
            found = True
            shown = ", ".join(f"{role} {version}" for role, version in seen.items())
            yield fail(
                "versions",
                f"{package} differs: {shown}",
                "give all executors one environment (launch.setup, launch.container)",
            )
    if reports and not found:
        yield ok("versions", "all ranks have the same packages", **reports[0].versions)


def _ending(step: Step) -> str:
    how = "no end in time" if step.returncode is None else f"exit code {step.returncode}"
    words = " ".join(step.words.split())[-300:]
    return f"{how}: {words}" if words else how
