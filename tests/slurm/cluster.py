"""A real Slurm on this machine: slurmctld and several slurmd, without root, munge or cgroups.

Every "node" is one slurmd with a name, a port and a folder of its own on this host. Three
partitions as a heterogeneous job wants them, one of all nodes, and the two of the example in
docs/slurm.md. GPUs are made up (gres.conf takes a link to /dev/null for a device). Without
accounting, as many small clusters are; with it where MariaDB and slurmdbd are installed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from accounting import Accounting, free_ports, wait_for

_CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
{accounting}
JobCompType=jobcomp/none
StateSaveLocation={state}
SlurmdSpoolDir={spool}/%n
TmpFS={tmp}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
# heterogeneous jobs are started by the backfill scheduler alone
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_resolution=1,bf_window=60,batch_sched_delay=0,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=256
ReturnToService=2
SlurmdTimeout=15
KillWait=60
MinJobAge=300
InactiveLimit=0
GresTypes=gpu
NodeName=node[1-4] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 \\
    Sockets=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=3000 Gres=gpu:a100:4 State=UNKNOWN
# jobs of `urgent` take the nodes of others, which have 25 s to leave and are requeued
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL MaxTime=01:00:00 DefaultTime=5 State=UP PriorityTier=10 \\
    PreemptMode=OFF
PartitionName=DEFAULT GraceTime=25
PartitionName=trainer Nodes=node[1-2] MaxTime=01:00:00 DefaultTime=5 State=UP Default=YES
PartitionName=generator Nodes=node3 MaxTime=01:00:00 DefaultTime=5 State=UP
PartitionName=reward Nodes=node4 MaxTime=01:00:00 DefaultTime=5 State=UP
PartitionName=all Nodes=ALL MaxTime=01:00:00 DefaultTime=5 State=UP
PartitionName=cpu Nodes=node[1-2] MaxTime=01:00:00 DefaultTime=5 State=UP
PartitionName=gpu Nodes=node[3-4] MaxTime=01:00:00 DefaultTime=5 State=UP
"""
_NONE = "AccountingStorageType=accounting_storage/none"
_NODES = ("node1", "node2", "node3", "node4")


@dataclass
class Cluster:
    """`start()`, use with `environ()`, `stop()`. `folder` must have a short path (sockets)."""

    folder: Path
    accounting: Accounting | None = None
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    def environ(self) -> dict[str, str]:
        """For clients: only where the configuration is."""
        return {"SLURM_CONF": str(self.conf)}

    def start(self) -> None:
        self._configure()
        if self.accounting is not None:
            self.accounting.start()
        self._daemon("slurmctld", "-D", "-c")
        for node in _NODES:
            self._daemon("slurmd", "-D", "-N", node)
        wait_for(
            30.0,
            "idle nodes",
            lambda: self._run("sinfo", "-hN", "-pall", "-tidle").count("node") == len(_NODES),
        )

    def stop(self) -> None:
        """End all jobs, then the daemons, then whatever of the jobs has outlived both."""
        self._run("scancel", "--full", f"--user={os.getuid()}")
        deadline = time.monotonic() + 10.0
        while self._run("squeue", "-h") and time.monotonic() < deadline:
            time.sleep(0.1)
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self.daemons:
            try:
                daemon.wait(10.0)
            except subprocess.TimeoutExpired:
                daemon.kill()
        if self.accounting is not None:
            self.accounting.stop()
        for process in psutil.process_iter():
            if self._is_ours(process):
                process.kill()

    def lose_node(self, node: str) -> None:
        """kill -9 of all that Slurm runs there, which it notices at once instead of after some
        minutes. A step that outlived its node would kill slurmctld 22.05 by its return."""
        daemon = self.daemons[1 + _NODES.index(node)]
        daemon.kill()
        daemon.wait()
        for step in self._steps(node):
            for process in (step, *step.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def return_node(self, node: str) -> None:
        """Start its slurmd again."""
        self._daemon("slurmd", "-D", "-N", node)
        self.daemons[1 + _NODES.index(node)] = self.daemons.pop()
        wait_for(30.0, node, lambda: node in self._run("sinfo", "-hN", "-pall", "-tidle"))

    def _steps(self, node: str) -> list[psutil.Process]:
        """Every slurmstepd has a socket in the folder of its slurmd."""
        folder = f"{self.folder / 'spool' / node}/"
        sockets = psutil.net_connections("unix")
        steps = {one.pid for one in sockets if str(one.laddr).startswith(folder)}
        return [psutil.Process(pid) for pid in steps if pid is not None]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            environ = process.environ()
        except psutil.Error:
            return False
        return environ.get("SLURM_CONF") == str(self.conf) and "SLURM_JOB_ID" in environ

    def _run(self, *argv: str) -> str:
        try:
            done = subprocess.run(
                argv,
                capture_output=True,
                text=True,
                timeout=10.0,
                env=os.environ | self.environ(),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return ""
        return done.stdout

    def _daemon(self, *argv: str) -> None:
        program = shutil.which(argv[0], path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        assert program is not None, argv[0]
        with (self.folder / "daemons.out").open("ab") as log:
            self.daemons.append(
                subprocess.Popen(
                    [program, *argv[1:]],
                    env=os.environ | self.environ(),
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    def _configure(self) -> None:
        places = {name: self.folder / name for name in ("state", "spool", "tmp", "gpu")}
        for place in places.values():
            place.mkdir(parents=True)
        for node in _NODES:
            (places["spool"] / node).mkdir()
            (places["tmp"] / node).mkdir()
        for number in range(4):
            (places["gpu"] / f"gpu{number}").symlink_to("/dev/null")
        first = free_ports(1 + len(_NODES))
        self.conf.write_text(
            _CONF.format(
                folder=self.folder,
                host=socket.gethostname().partition(".")[0],
                user=psutil.Process().username(),
                port=first,
                first=first + 1,
                last=first + len(_NODES),
                accounting=self.accounting.conf if self.accounting is not None else _NONE,
                **places,
            )
        )
        (self.folder / "gres.conf").write_text(
            f"NodeName=node[1-4] Name=gpu Type=a100 File={places['gpu']}/gpu[0-3]\n"
        )
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
