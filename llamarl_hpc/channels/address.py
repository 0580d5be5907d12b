"""Where the controller listens, and the keys to talk to it: one private file in the run folder.

It is the only thing an executor needs to know about the network. A controller writes it at every
start, with new keys, so what is left of an older attempt cannot talk to the new controller.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat

import msgspec
import psutil

from llamarl_hpc.errors import ChannelError, ConfigError
from llamarl_hpc.placement import interface_address
from llamarl_hpc.run_dir import RunDir


class ControllerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `RunDir.address`: everything an executor needs to reach the controller.

    It holds the run's client key, so the file is readable by its owner only (0600). The server's
    secret key is never written anywhere.
    """

    addresses: list[str]  # IPv4, best first
    port: int
    attempt: int
    token: str  # another one at every start of a controller
    pid: int
    host: str
    server_public: str  # CURVE keys, Z85
    client_public: str
    client_secret: str

    def endpoints(self, own_host: str) -> list[str]:
        """What a client on `own_host` should try, in this order."""
        local = ["127.0.0.1"] if own_host == self.host else []
        addresses = dict.fromkeys([*local, *self.addresses])
        return [f"tcp://{address}:{self.port}" for address in addresses]


def read_address(run: RunDir) -> ControllerAddress | None:
    """Where the controller of this run listens; None when none has said so (yet, or any more)."""
    try:
        data = run.address.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise ChannelError(f"only the owner of the run may read {run.address}") from error
    try:
        return msgspec.json.decode(data, type=ControllerAddress)
    except msgspec.MsgspecError as error:
        raise ChannelError(f"{run.address} is not a controller's address file: {error}") from error


def choose_addresses(interface: str | None, one_host: bool) -> tuple[str, list[str]]:
    """Where to listen, and the addresses to publish, best first."""
    if interface:
        address = interface_address(interface)
        return address, [address]
    if one_host:
        return "127.0.0.1", ["127.0.0.1"]
    found = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET
    ]
    reachable = [
        a for a in dict.fromkeys([interface_address(), *found]) if not a.startswith("127.")
    ]
    if not reachable:
        raise ConfigError(
            "executors run on several hosts but this one has only the loopback interface; set "
            "channels.interface to the network interface that the nodes share"
        )
    return "*", reachable


def write_address(run: RunDir, address: ControllerAddress) -> None:
    """The address file, whole or not at all, and never for a moment readable by others."""
    run.keys.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = run.address.with_name(f".{run.address.name}.{secrets.token_hex(4)}")
    try:
        if stat.S_IMODE(run.keys.stat().st_mode) & 0o077:
            run.keys.chmod(0o700)
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            if stat.S_IMODE(os.fstat(handle).st_mode) & 0o077:
                raise ConfigError(
                    f"{run.keys} lies on a file system without permissions, so anybody could "
                    "read the run's keys; put the run folder (runs_dir) on another one"
                )
            file.write(msgspec.json.encode(address))
            file.flush()
            os.fsync(handle)
        os.replace(beside, run.address)
    except OSError as error:
        raise ConfigError(f"cannot write the run's keys into {run.keys}: {error}") from error
    finally:
        beside.unlink(missing_ok=True)
