"""What both ends must agree on: socket options, identities, and the counts that show a loss."""

from __future__ import annotations

import zmq
import zmq.asyncio

from llamarl_hpc.config.schema import ChannelConfig
from llamarl_hpc.errors import ChannelError

LINGER_S = 3.0  # how long a closing end tries to deliver what is queued

_ENVELOPE_BYTES = 4096  # frame overhead of encryption and framing on top of max_message_mb


def set_options(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, config: ChannelConfig) -> None:
    """No bound on queues (see the package's head), dead connections found, large frames refused."""
    socket.sndhwm = 0
    socket.rcvhwm = 0
    socket.linger = 0
    socket.maxmsgsize = (config.max_message_mb << 20) + _ENVELOPE_BYTES
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = 60


def identity_of(executor: str, instance: str) -> bytes:
    """How one start of an executor is addressed on the wire."""
    identity = f"{executor}#{instance}".encode()
    assert executor and instance and "#" not in executor and len(identity) < 256
    return identity


def count_frame(number: int) -> bytes:
    """The frame that says how many messages this side has sent."""
    return number.to_bytes(8, "big")


def check_count(frame: memoryview, expected: int) -> None:
    """Raises ChannelError when the other side has sent more, or fewer, than arrived here."""
    number = int.from_bytes(frame, "big")
    if len(frame) != 8 or number != expected:
        raise ChannelError(
            f"the sender has sent {number} messages but {expected} arrived: a lost connection "
            "has swallowed some"
        )
