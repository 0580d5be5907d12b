"""An executor's end: a DEALER served by a background thread, which waits for nobody, so heartbeats
go out while the main thread computes; and the search for the controller before that."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket as net
import threading
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from llamarl_hpc.channels.address import ControllerAddress, read_address
from llamarl_hpc.channels.codec import Frame, decode, encode
from llamarl_hpc.channels.messages import Heartbeat, Ping, ToController, ToExecutor
from llamarl_hpc.channels.zmq.wire import (
    LINGER_S,
    check_count,
    count_frame,
    identity_of,
    set_options,
)
from llamarl_hpc.config.schema import ChannelConfig
from llamarl_hpc.errors import ChannelError
from llamarl_hpc.run_dir import RunDir

HANDSHAKE_S = 5.0  # one try of one address

_log = logging.getLogger(__name__)


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
        self._activity = self._signal = ""
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
    def signal_fd(self) -> int:
        """For `signal.set_wakeup_fd`: signals are told to the controller at once, also while the
        main thread computes."""
        return self._wake_write

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
                beat = Heartbeat(sequence=beats, activity=self._activity, signal=self._signal)
                self._dealer.send_multipart([count_frame(self._sent), *encode(beat)], zmq.NOBLOCK)
                self._signal = ""
                next_beat = max(next_beat + self._heartbeat_s, now)
            ready = dict(poller.poll(max(1, int((next_beat - now) * 1000))))
            if self._wake_read in ready:
                if numbers := os.read(self._wake_read, 4096).strip(b"\0"):
                    self._signal = signal.Signals(numbers[-1]).name
                    next_beat = now
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
            self._dealer.send_multipart([count_frame(self._sent), *frames], zmq.NOBLOCK)

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
                check_count(frames[0], self._received)
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
    identity = identity_of(executor, instance)
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
    set_options(dealer, config)
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
