"""Probe the nodes on which executors will run: one job step for each role, all at one time.

    Beacon (pulse file, peer)  <-  ranks of the steps  ->  lines of JSON  ->  reports.judge

Works in a Slurm job and, through mpiexec, on a machine without Slurm. Never takes longer than
`launch.preflight_timeout_s`: what has not ended then is killed and named.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from llamarl_hpc.config.schema import Config
from llamarl_hpc.controller.supervisor import kill_all
from llamarl_hpc.launch.children import start
from llamarl_hpc.launch.doctor.finding import Finding, fail, ok
from llamarl_hpc.launch.doctor.network import Peer
from llamarl_hpc.launch.doctor.probe import MARK, PULSE, Pulse, Report, Spec, gone, measured
from llamarl_hpc.launch.doctor.reports import Expected, Step, judge
from llamarl_hpc.launch.doctor.shared_memory import needs
from llamarl_hpc.launch.request import component_block, roles_of
from llamarl_hpc.launch.steps import Probe
from llamarl_hpc.models.load import tensor_shapes
from llamarl_hpc.placement import interface_address
from llamarl_hpc.storage.atomic import write_text

# parts of the whole time: how long a rank waits for our file, and for other roles to start
_PATIENCE, _MEET = 0.2, 0.7
_PULSE_S = 0.2
_END_S = 3.0
_BACK_S = 5.0  # for what another node wrote to be seen


class ProbeLauncher(Protocol):
    def probe(self, role: str, program: Sequence[str]) -> Probe:
        """How to start a probe on the nodes of a role."""


@dataclass(frozen=True, kw_only=True)
class Ground:
    """Where a run will take place."""

    config: Config
    launcher: ProbeLauncher
    folder: Path  # shared; a new folder is made in it, and removed
    model_folder: Path | None
    one_host: bool


def probe_all(ground: Ground) -> list[Finding]:
    """Findings about all roles."""
    start, longest = time.monotonic(), ground.config.launch.preflight_timeout_s
    folder = Path(tempfile.mkdtemp(dir=ground.folder, prefix=".doctor-"))
    try:
        with Beacon(folder) as beacon:
            probes, steps = _run(ground, beacon, start + longest)
        back = _check_back(folder, steps)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    expected = {role: _expected(ground, role, probe) for role, probe in probes.items()}
    seconds = time.monotonic() - start
    return [*judge(steps, expected), *back, ok("probes", f"looked for {seconds:.0f} s")]


def _run(ground: Ground, beacon: Beacon, end: float) -> tuple[dict[str, Probe], dict[str, Step]]:
    probes: dict[str, Probe] = {}
    running: dict[str, _Running] = {}
    try:
        for role in roles_of(ground.config):
            spec = msgspec.json.encode(beacon.spec(ground, role)).decode()
            probe = ground.launcher.probe(role, ["-m", "llamarl_hpc.launch.doctor.probe", spec])
            probes[role] = probe
            running[role] = _Running(probe, beacon.folder / f"{role}.out")
            beacon.watch(role, running[role].process)
        return probes, {role: step.finish(end) for role, step in running.items()}
    finally:
        for step in running.values():
            step.end()  # after a signal


class _Running:
    """A step under way; what it prints goes to a file."""

    def __init__(self, probe: Probe, output: Path) -> None:
        self._probe, self._output = probe, output
        with output.open("wb") as log:
            self.process = start(
                probe.command.argv,
                env=probe.command.env,
                stdout=log,
                stderr=log,
                end_with=probe.command.end_with,
            )

    def finish(self, end: float) -> Step:
        """Wait until it ends, or until `end` (monotonic), when it is ended."""
        returncode: int | None = None
        try:
            returncode = self.process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.end()
        reports, words = read_output(self._output.read_text(errors="replace"))
        return Step(reports=reports, returncode=returncode, words=words)

    def end(self) -> None:
        """If it has not ended by itself. A launcher with ranks elsewhere must end them."""
        if self.process.poll() is not None:
            return
        if self._probe.command.end_with != signal.SIGKILL:
            self.process.send_signal(self._probe.command.end_with)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_S)
        kill_all([self.process.pid])
        self.process.wait()


def read_output(text: str) -> tuple[list[Report], str]:
    """The newest report of each rank, by rank; and everything else that was printed."""
    newest: dict[tuple[str, int], Report] = {}
    words = []
    for line in text.splitlines():
        before, mark, body = line.partition(MARK)
        try:
            report = msgspec.json.decode(body, type=Report) if mark else None
        except msgspec.DecodeError:
            report = None
        if report is None:
            words.append(line)
            continue
        if before.strip():
            words.append(before)
        newest[(report.host, report.pid)] = report
    return sorted(newest.values(), key=lambda report: report.rank), "\n".join(words)


def _expected(ground: Ground, role: str, probe: Probe) -> Expected:
    config = ground.config
    block = component_block(config, role)
    shapes = tensor_shapes(ground.model_folder) if ground.model_folder else {}
    return Expected(
        ranks=probe.ranks,
        cpus=block.cpus_per_task if probe.is_real else 1,
        gpus=block.gpus_per_node,
        is_real=probe.is_real,
        shm=needs(config, shapes, one_host=ground.one_host).get(role),
    )


def _check_back(folder: Path, steps: Mapping[str, Step]) -> list[Finding]:
    """Whether what leaders wrote into the folder is seen here."""
    wrote = {r.role for step in steps.values() for r in step.reports if r.wrote}
    end = time.monotonic() + _BACK_S
    unseen = wrote
    while unseen := {role for role in unseen if not (folder / measured(role)).exists()}:
        if time.monotonic() > end:
            return [
                fail(
                    "shared_folder_back",
                    f"what {' and '.join(sorted(unseen))} wrote into the run folder is not seen by "
                    "the controller",
                    "choose a folder that all nodes share (runs_dir, or --run-dir)",
                )
            ]
        time.sleep(_PULSE_S)
    return [ok("shared_folder_back", "the controller sees what executors write")] if wrote else []


# ------------------------------------------------------------------ the controller's side


class Beacon:
    """What the probes look for: a file that is written again and again, and a peer."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.token = folder, secrets.token_hex(16)
        self.peer = Peer(self.token)
        self._steps: dict[str, subprocess.Popen[bytes]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Beacon:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peer.close()

    def spec(self, ground: Ground, role: str) -> Spec:
        """What the probe of a role is told."""
        config = ground.config
        return Spec(
            role=role,
            folder=str(self.folder),
            token=self.token,
            controller=(interface_address(config.channels.interface), self.peer.port),
            roles=roles_of(config),
            interface=config.channels.interface,
            files=_files(ground, role),
            gpus=component_block(config, role).gpus_per_node,
            patience_s=_PATIENCE * config.launch.preflight_timeout_s,
            meet_s=_MEET * config.launch.preflight_timeout_s,
        )

    def watch(self, role: str, process: subprocess.Popen[bytes]) -> None:
        """Tell the other roles when this step has ended, so that they do not wait for it."""
        self._steps[role] = process

    def _beat(self) -> None:
        while not self._stop.is_set():
            for role, process in list(self._steps.items()):
                if process.poll() is not None:
                    with contextlib.suppress(OSError):
                        (self.folder / gone(role)).touch()
                    del self._steps[role]
            pulse = Pulse(token=self.token, time=time.time())
            with contextlib.suppress(OSError):
                write_text(self.folder / PULSE, msgspec.json.encode(pulse).decode())
            self._stop.wait(_PULSE_S)


def _files(ground: Ground, role: str) -> list[str]:
    """Files that the executors of a role open themselves."""
    if role == "reward":
        places = [
            r.function.rpartition(":")[0] for r in ground.config.rewards if r.kind == "python"
        ]
        return [place for place in places if place.endswith(".py")]
    folder = ground.model_folder
    if folder is None:
        return []
    return [str(folder / "config.json"), str(folder / "tokenizer.json")]
