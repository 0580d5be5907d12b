"""The channel over ZeroMQ: one ROUTER at the controller, one DEALER per executor. The only door
to zmq.

    wire:       [identity]  count (8 bytes)  header (msgpack)  array 0  array 1 ...
    count:      messages sent so far on this side, this one included; heartbeats are not counted
    identity:   "generator.1#3"  executor and instance; the router strips and adds it

Who may talk: every start of a controller makes new CURVE key pairs. The client pair and the
server's public key go into the address file (0600); without them a peer gets no further than the
handshake. Who is heard: only the instances that the controller expects (see channels/base.py).

Nothing is lost silently: queues have no bound (credit bounds what is in flight), a closed channel
flushes for LINGER_S, a message that cannot be delivered is an error at the sender, and what a
broken connection swallows shows as a gap in the counts at the next message or heartbeat. Who
waits for whom: the controller's loop for any executor (`receive`), an executor's main thread for
the controller (`receive`, with a limit). The executor's own background thread waits for neither,
so heartbeats go out while the main thread computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import secrets
import socket as net
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from llamarl_hpc.channels.address import (
    ControllerAddress,
    choose_addresses,
    read_address,
    write_address,
)
from llamarl_hpc.channels.codec import Frame, decode, encode
from llamarl_hpc.channels.messages import Heartbeat, Ping, ToController, ToExecutor
from llamarl_hpc.config.schema import ChannelConfig
from llamarl_hpc.errors import ChannelError, ConfigError
from llamarl_hpc.run_dir import RunDir

LINGER_S = 3.0  # how long a closing end tries to deliver what is queued
HANDSHAKE_S = 5.0  # one try of one address

_ZAP_DOMAIN = "llamarl"
_ENVELOPE_BYTES = 4096  # frame overhead of encryption and framing on top of max_message_mb
_log = logging.getLogger(__name__)


# --------------------------------------------------------------------------- controller


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
        self._peers[executor] = _Peer(identity=_identity(executor, instance))

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
            raise ChannelError(f"{executor} is not connected: nobody expects it")
        frames = encode(message, max_bytes=self._max_bytes)
        counted = 0 if isinstance(message, Ping) else 1
        peer.sent += counted
        try:
            await self._router.send_multipart([peer.identity, _count(peer.sent), *frames])
        except zmq.ZMQError as error:
            peer.sent -= counted  # it never left: no gap for the executor to find
            raise ChannelError(f"{executor} is not connected: {error}") from error

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
            _check_count(frames[1], peer.received)
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
    _set_options(router, config)
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


# --------------------------------------------------------------------------- executor


class ExecutorChannel:
    """The end in rank 0 of an executor (an `ExecutorEnd`). Make it with `connect`."""

    def __init__(
        self,
        *,
        executor: str,
        config: ChannelConfig,
        address: ControllerAddress,
        context: zmq.Context[zmq.Socket[bytes]],
        dealer: zmq.Socket[bytes],
    ) -> None:
        self.attempt = address.attempt
        self._executor = executor
        self._max_bytes = config.max_message_mb << 20
        self._heartbeat_s = config.heartbeat_s
        self._context, self._dealer = context, dealer
        self._outgoing: queue.SimpleQueue[list[Frame] | None] = queue.SimpleQueue()
        self._incoming: queue.SimpleQueue[ToExecutor | ChannelError] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._sent = self._received = 0
        self._activity = ""
        self._heard_at = time.monotonic()
        self._error: ChannelError | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="channel", daemon=True)
        self._thread.start()

    @classmethod
    def connect(
        cls, run: RunDir, executor: str, instance: str, config: ChannelConfig, timeout_s: float
    ) -> ExecutorChannel:
        """Wait for the controller's address file, then shake hands; try until `timeout_s` is over.

        Raises ChannelError that names every address tried and how each try ended.
        """
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            address, dealer = _reach(run, executor, instance, config, timeout_s, context)
        except BaseException:
            context.destroy(linger=0)
            raise
        return cls(
            executor=executor, config=config, address=address, context=context, dealer=dealer
        )

    def send(self, message: ToController) -> None:
        self._check()
        frames = encode(message, max_bytes=self._max_bytes)
        # The background thread sends later, so the arrays are copied now.
        self._outgoing.put([bytes(frame) for frame in frames])
        self._wake()

    def receive(self, timeout_s: float) -> ToExecutor | None:
        try:
            item = self._incoming.get(block=timeout_s > 0, timeout=timeout_s or None)
        except queue.Empty:
            self._check()
            return None
        if isinstance(item, ChannelError):
            raise item
        return item

    def set_activity(self, activity: str) -> None:
        self._activity = activity

    @property
    def controller_silent_s(self) -> float:
        return time.monotonic() - self._heard_at

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._outgoing.put(None)
        self._wake()
        self._thread.join(LINGER_S + 5.0)
        os.close(self._wake_write)

    def _check(self) -> None:
        if self._error is not None:
            raise ChannelError(str(self._error)) from self._error
        if self._closed:
            raise ChannelError(f"the channel of {self._executor} is closed")

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # a full pipe wakes just as well
            os.write(self._wake_write, b"\0")

    # ------------------------------------------------------------------ background thread

    def _serve(self) -> None:
        try:
            self._exchange()
        except (
            Exception
        ) as error:  # the main thread must hear of it: without heartbeats we are dead
            _log.exception("the channel of %s broke", self._executor)
            self._error = ChannelError(f"the channel of {self._executor} broke: {error!r}")
            self._incoming.put(self._error)
        finally:
            self._dealer.close(linger=int(LINGER_S * 1000))
            self._context.term()  # returns within LINGER_S
            os.close(self._wake_read)

    def _exchange(self) -> None:
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        beats, next_beat = 0, time.monotonic()
        while True:
            now = time.monotonic()
            if now >= next_beat:
                beats += 1
                beat = Heartbeat(sequence=beats, activity=self._activity)
                self._dealer.send_multipart([_count(self._sent), *encode(beat)], zmq.NOBLOCK)
                next_beat = max(next_beat + self._heartbeat_s, now)
            ready = dict(poller.poll(max(1, int((next_beat - now) * 1000))))
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
                if not self._flush():
                    return
            if self._dealer in ready:
                self._collect()

    def _flush(self) -> bool:
        """Send what is queued; False when the channel is to close."""
        while True:
            try:
                frames = self._outgoing.get_nowait()
            except queue.Empty:
                return True
            if frames is None:
                return False
            self._sent += 1
            self._dealer.send_multipart([_count(self._sent), *frames], zmq.NOBLOCK)

    def _collect(self) -> None:
        for _ in range(100):  # then look at the outgoing queue again
            try:
                received = self._dealer.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._heard_at = time.monotonic()
            frames = [frame.buffer for frame in received]
            try:
                message = decode(frames[1:], ToExecutor, max_bytes=self._max_bytes)
                self._received += 0 if isinstance(message, Ping) else 1
                _check_count(frames[0], self._received)
            except ChannelError as error:
                self._incoming.put(ChannelError(f"from the controller: {error}"))
                continue
            if not isinstance(message, Ping):
                self._incoming.put(message)


def _reach(
    run: RunDir,
    executor: str,
    instance: str,
    config: ChannelConfig,
    timeout_s: float,
    context: zmq.Context[zmq.Socket[bytes]],
) -> tuple[ControllerAddress, zmq.Socket[bytes]]:
    """A DEALER that has shaken hands with the run's controller. The address is read anew each
    round: after a restart the controller listens elsewhere, with other keys."""
    start = time.monotonic()
    deadline, pause_s, told_at = start + timeout_s, 0.05, start
    tries: dict[str, str] = {}
    identity = _identity(executor, instance)
    while True:
        address = read_address(run)
        if address is not None:
            dealer = _try_endpoints(context, config, identity, address, deadline, tries)
            if dealer is not None:
                return address, dealer
        now = time.monotonic()
        if now >= deadline:
            detail = "; ".join(f"{endpoint}: {why}" for endpoint, why in tries.items())
            raise ChannelError(
                f"{executor} could not reach the controller within {timeout_s:g} s "
                f"({detail or f'no address file {run.address}'}); see the controller's log, and "
                "set channels.interface to the network that the nodes share"
            )
        if now - told_at >= 60.0:
            told_at = now
            _log.warning("%s still waits for the controller: %s", executor, tries or run.address)
        time.sleep(min(pause_s, deadline - now))
        pause_s = min(pause_s * 1.5, 1.0)


def _try_endpoints(
    context: zmq.Context[zmq.Socket[bytes]],
    config: ChannelConfig,
    identity: bytes,
    address: ControllerAddress,
    deadline: float,
    tries: dict[str, str],
) -> zmq.Socket[bytes] | None:
    for endpoint in address.endpoints(net.gethostname()):
        dealer = _dealer(context, identity, address, config)
        left = deadline - time.monotonic()
        failure = _shake_hands(dealer, endpoint, max(0.1, min(HANDSHAKE_S, left)))
        if failure is None:
            return dealer
        dealer.close(linger=0)
        tries[endpoint] = failure
    return None


def _dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    identity: bytes,
    address: ControllerAddress,
    config: ChannelConfig,
) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    _set_options(dealer, config)
    dealer.routing_id = identity
    dealer.curve_serverkey = address.server_public.encode()
    dealer.curve_publickey = address.client_public.encode()
    dealer.curve_secretkey = address.client_secret.encode()
    return dealer


def _shake_hands(dealer: zmq.Socket[bytes], endpoint: str, timeout_s: float) -> str | None:
    """None once the controller has accepted this peer; else how the try ended."""
    failures: dict[int, str] = {
        zmq.EVENT_CLOSED: "nobody listens there",
        zmq.EVENT_CONNECT_RETRIED: "nobody listens there",
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it hung up during the handshake",
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not speak this protocol",
        zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it refused the key",
    }
    monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | sum(failures))
    deadline = time.monotonic() + timeout_s
    try:
        dealer.connect(endpoint)
        while (left := deadline - time.monotonic()) > 0:
            if monitor.poll(int(left * 1000) + 1):
                return failures.get(int(recv_monitor_message(monitor)["event"]))
        return f"no answer within {timeout_s:g} s"
    except zmq.ZMQError as error:
        return str(error)
    finally:
        dealer.disable_monitor()


# --------------------------------------------------------------------------- both ends


def _set_options(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, config: ChannelConfig) -> None:
    """No bound on queues (see the module's head), dead connections found, large frames refused."""
    socket.sndhwm = 0
    socket.rcvhwm = 0
    socket.linger = 0
    socket.maxmsgsize = (config.max_message_mb << 20) + _ENVELOPE_BYTES
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = 60


def _identity(executor: str, instance: str) -> bytes:
    identity = f"{executor}#{instance}".encode()
    assert executor and instance and "#" not in executor and len(identity) < 256
    return identity


def _count(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _check_count(frame: memoryview, expected: int) -> None:
    number = int.from_bytes(frame, "big")
    if len(frame) != 8 or number != expected:
        raise ChannelError(
            f"the sender has sent {number} messages but {expected} arrived: a lost connection "
            "has swallowed some"
        )
