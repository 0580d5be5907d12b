"""Accounting of a Slurm on this machine, where MariaDB and slurmdbd are installed: sacct works."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_PROGRAMS = ("slurmdbd", "mariadbd", "mariadb", "mariadb-install-db")
_CONF = """AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}"""
_DBD_CONF = """
AuthType=auth/none
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser={user}
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={sql_port}
StorageUser=slurm
StoragePass=tests
StorageLoc=slurm_acct_db
"""
_GRANT = """
create database slurm_acct_db;
create user slurm@'127.0.0.1' identified by 'tests';
grant all on slurm_acct_db.* to slurm@'127.0.0.1';
"""
_SQL = (
    "--bind-address=127.0.0.1",
    "--skip-name-resolve",
    "--innodb-buffer-pool-size=64M",
    "--innodb-log-file-size=16M",
    "--innodb-flush-log-at-trx-commit=0",
    "--innodb-lock-wait-timeout=900",
    "--performance-schema=OFF",
)


@dataclass
class Accounting:
    """`start()` before slurmctld, whose configuration has `conf` in it; `stop()` after it."""

    folder: Path  # the cluster's
    cluster: str = "tests"
    port: int = field(default_factory=lambda: free_ports(2, first=30_000))
    _daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @staticmethod
    def missing() -> list[str]:
        """Programs that are not on this machine."""
        return [name for name in _PROGRAMS if _program(name) is None]

    @property
    def conf(self) -> str:
        return _CONF.format(port=self.port)

    def start(self) -> None:
        user = psutil.Process().username()
        self._start_database(user)
        conf = self.folder / "slurmdbd.conf"
        conf.write_text(
            _DBD_CONF.format(port=self.port, sql_port=self.port + 1, user=user, folder=self.folder)
        )
        conf.chmod(0o600)
        self._daemon("slurmdbd", "-D")
        wait_for(60.0, "answer of slurmdbd", lambda: self._run("sacctmgr", "-n", "list", "cluster"))
        self._run("sacctmgr", "-i", "add", "cluster", self.cluster)

    def stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(20.0)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def _start_database(self, user: str) -> None:
        data = self.folder / "mysql"
        socket_file = self.folder / "mysql.sock"
        assert self._run(
            "mariadb-install-db",
            "--no-defaults",
            f"--user={user}",
            f"--datadir={data}",
            "--skip-test-db",
            "--auth-root-authentication-method=normal",
        )
        self._daemon(
            "mariadbd",
            "--no-defaults",
            f"--user={user}",
            f"--datadir={data}",
            f"--socket={socket_file}",
            f"--port={self.port + 1}",
            f"--pid-file={self.folder}/mariadbd.pid",
            *_SQL,
        )
        client = ("mariadb", "--no-defaults", "-uroot", "-S", str(socket_file), "-e")
        wait_for(60.0, "answer of MariaDB", lambda: self._run(*client, "select 1"))
        assert self._run(*client, _GRANT)

    def _run(self, *argv: str) -> bool:
        """Whether it succeeded."""
        with (self.folder / "accounting.out").open("ab") as log:
            try:
                done = subprocess.run(
                    [_program(argv[0]) or argv[0], *argv[1:]],
                    env=os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")},
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    timeout=60.0,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return False
        return done.returncode == 0

    def _daemon(self, *argv: str) -> None:
        program = _program(argv[0])
        assert program is not None, argv[0]
        with (self.folder / "accounting.out").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    [program, *argv[1:]],
                    env=os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")},
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def free_ports(number: int, *, first: int = 17_000) -> int:
    """First of `number` ports in a row that nobody listens on."""
    for start in range(first, first + 2_000, 50):
        sockets = []
        try:
            for port in range(start, start + number):
                probe = socket.socket()
                sockets.append(probe)
                probe.bind(("127.0.0.1", port))
            return start
        except OSError:
            continue
        finally:
            for probe in sockets:
                probe.close()
    raise AssertionError("no free ports")


def wait_for(timeout_s: float, what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {timeout_s} s"
        time.sleep(0.1)
