"""The controller's end: a ROUTER that hears the expected instances, and tells all of them that it
lives. Waits for any executor, in the controller's asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket as net
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from llamarl_hpc.channels.address import (
    ControllerAddress,
    choose_addresses,
    read_address,
    write_address,
)
from llamarl_hpc.channels.codec import decode, encode
from llamarl_hpc.channels.messages import Heartbeat, Ping, ToController, ToExecutor
from llamarl_hpc.channels.zmq.wire import (
    LINGER_S,
    check_count,
    count_frame,
    identity_of,
    set_options,
)
from llamarl_hpc.config.schema import ChannelConfig
from llamarl_hpc.errors import ChannelError, ConfigError, NotConnectedError
from llamarl_hpc.run_dir import RunDir

_ZAP_DOMAIN = "llamarl"
_log = logging.getLogger(__name__)


@dataclass
class _Peer:
    """What the controller knows about the expected instance of one executor."""

    identity: bytes
    heard_at: float = field(default_factory=time.monotonic)
    connected: bool = False
    broken: bool = False  # a message of it was refused or lost; it is not heard any more
    received: int = 0  # messages, heartbeats not counted
    sent: int = 0


class ControllerChannel:
    """The controller's end (a `ControllerEnd`). Make it with `bind`, inside a running loop."""

    def __init__(
        self,
        *,
        run: RunDir,
        config: ChannelConfig,
        address: ControllerAddress,
        context: zmq.asyncio.Context,
        router: zmq.asyncio.Socket,
        authenticator: AsyncioAuthenticator,
    ) -> None:
        self.address = address
        self.num_refused = 0  # messages of strangers, old instances, and malformed ones
        self._run = run
        self._max_bytes = config.max_message_mb << 20
        self._heartbeat_s = config.heartbeat_s
        self._context, self._router, self._authenticator = context, router, authenticator
        self._peers: dict[str, _Peer] = {}
        self._arrived: asyncio.Queue[tuple[str, ToController | ChannelError]] = asyncio.Queue()
        self._complained_at = -1e9
        self._closed = False
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._ping())]

    @classmethod
    def bind(
        cls,
        run: RunDir,
        config: ChannelConfig,
        *,
        attempt: int | None = None,
        one_host: bool = False,
    ) -> ControllerChannel:
        """Make keys, listen on a free port and write the address file.

        With `one_host` (all executors run beside the controller) only loopback listens, unless
        `config.interface` says otherwise. `attempt` defaults to the run's newest. Raises
        ConfigError when no usable address or no private key folder can be had.
        """
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        listen, addresses = choose_addresses(config.interface, one_host)
        context = zmq.asyncio.Context()
        authenticator = _authenticator(context, client_public)
        try:
            router = _router(context, config, server_secret, listen)
            address = ControllerAddress(
                addresses=addresses,
                port=_port(router),
                attempt=run.last_attempt() if attempt is None else attempt,
                token=secrets.token_hex(8),
                pid=os.getpid(),
                host=net.gethostname(),
                server_public=server_public.decode(),
                client_public=client_public.decode(),
                client_secret=client_secret.decode(),
            )
            write_address(run, address)
        except BaseException:
            authenticator.stop()
            context.destroy(linger=0)
            raise
        return cls(
            run=run,
            config=config,
            address=address,
            context=context,
            router=router,
            authenticator=authenticator,
        )

    def expect(self, executor: str, instance: str) -> None:
        self._peers[executor] = _Peer(identity=identity_of(executor, instance))

    def forget(self, executor: str) -> None:
        self._peers.pop(executor, None)

    async def receive(self) -> tuple[str, ToController | ChannelError]:
        executor, message = await self._arrived.get()
        if not executor:  # the reading task has ended
            assert isinstance(message, ChannelError)
            raise message
        return executor, message

    async def send(self, executor: str, message: ToExecutor) -> None:
        peer = self._peers.get(executor)
        if peer is None or self._closed:
            raise NotConnectedError(f"{executor} is not connected: nobody expects it")
        frames = encode(message, max_bytes=self._max_bytes)
        counted = 0 if isinstance(message, Ping) else 1
        peer.sent += counted
        try:
            await self._router.send_multipart([peer.identity, count_frame(peer.sent), *frames])
        except zmq.ZMQError as error:
            peer.sent -= counted  # it never left: no gap for the executor to find
            raise NotConnectedError(f"{executor} is not connected: {error}") from error

    def silent_s(self, executor: str) -> float:
        peer = self._peers.get(executor)
        return 0.0 if peer is None else time.monotonic() - peer.heard_at

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ChannelError, OSError):
            written = read_address(self._run)
            if written is not None and written.token == self.address.token:
                self._run.address.unlink()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._router.close(linger=int(LINGER_S * 1000))
        self._authenticator.stop()
        await asyncio.to_thread(self._context.term)  # returns within LINGER_S

    async def _read(self) -> None:
        try:
            while True:
                frames = await self._router.recv_multipart(copy=False)
                self._accept([frame.buffer for frame in frames])
        except Exception as error:  # `receive` must not wait for a task that has ended
            _log.exception("the controller's channel broke")
            self._arrived.put_nowait(("", ChannelError(f"the controller's channel: {error!r}")))

    async def _ping(self) -> None:
        """Tell every executor that this loop is alive."""
        sequence = 0
        while True:
            sequence += 1
            for executor, peer in list(self._peers.items()):
                if peer.connected:
                    with contextlib.suppress(ChannelError):
                        await self.send(executor, Ping(sequence=sequence))
            await asyncio.sleep(self._heartbeat_s)

    def _accept(self, frames: Sequence[memoryview]) -> None:
        identity = bytes(frames[0])
        executor = identity.partition(b"#")[0].decode(errors="replace")
        peer = self._peers.get(executor)
        if peer is None or peer.identity != identity or peer.broken:
            self._refuse(f"a message of {identity[:80]!r}, which is not expected")
            return
        peer.heard_at = time.monotonic()
        peer.connected = True
        message: ToController | ChannelError
        try:
            message = decode(frames[2:], ToController, max_bytes=self._max_bytes)
            peer.received += 0 if isinstance(message, Heartbeat) else 1
            check_count(frames[1], peer.received)
        except ChannelError as error:
            self._refuse(f"a message of {executor}: {error}")
            peer.broken = True
            message = error
        self._arrived.put_nowait((executor, message))

    def _refuse(self, what: str) -> None:
        """Count it, and log at most one line a second: a flood must not fill the disk."""
        self.num_refused += 1
        if time.monotonic() - self._complained_at >= 1.0:
            self._complained_at = time.monotonic()
            _log.warning("refused %s (%d refused so far)", what, self.num_refused)


def _router(
    context: zmq.asyncio.Context, config: ChannelConfig, server_secret: bytes, listen: str
) -> zmq.asyncio.Socket:
    router = context.socket(zmq.ROUTER)
    set_options(router, config)
    router.router_mandatory = True  # an unknown receiver is an error, not silence
    router.router_handover = True  # a reconnecting executor replaces its dead connection
    router.curve_server = True
    router.curve_secretkey = server_secret
    router.zap_domain = _ZAP_DOMAIN.encode()  # no authenticator, no entry
    try:
        router.bind(f"tcp://{listen}:0")
    except zmq.ZMQError as error:
        raise ConfigError(
            f"cannot listen on {listen} ({error}); set channels.interface to a network "
            "interface or an IPv4 address of this host"
        ) from error
    return router


def _port(router: zmq.asyncio.Socket) -> int:
    endpoint = router.last_endpoint
    assert isinstance(endpoint, bytes)
    return int(endpoint.rpartition(b":")[2])


class _OnlyKey:
    """The authenticator's question "may this key in?"; one key may."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        return secrets.compare_digest(key, self._key)


def _authenticator(context: zmq.asyncio.Context, client_public: bytes) -> AsyncioAuthenticator:
    authenticator = AsyncioAuthenticator(context, log=_log)
    authenticator.configure_curve_callback(_ZAP_DOMAIN, _OnlyKey(client_public))
    authenticator.start()
    return authenticator
