"""Small TCP conversations between machines: what time is it there, and how fast is the line.

A `Peer` answers until it is closed; `ask_time` and `measure` talk to one. Every conversation
begins with the token of this examination. No data of a run travels here.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

_CLOCK, _BULK = b"c", b"b"
_CHUNK = 1 << 18
_MAX_BYTES = 1 << 28
BULK_BYTES = 4 << 20
_ASKS = 3


class Peer:
    """Answers on a port that the system chooses, in threads of its own."""

    def __init__(self, token: str, timeout_s: float = 20.0) -> None:
        self._token, self._timeout_s = token.encode(), timeout_s
        self._socket = socket.create_server(("", 0))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _listen(self) -> None:
        while True:
            try:
                line, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(line,), daemon=True).start()

    def _answer(self, line: socket.socket) -> None:
        with line, contextlib.suppress(OSError):
            line.settimeout(self._timeout_s)
            if _receive(line, len(self._token)) != self._token:
                return
            if _receive(line, 1) == _CLOCK:
                line.sendall(struct.pack("!d", time.time()))
                return
            (size,) = struct.unpack("!Q", _receive(line, 8))
            left = min(size, _MAX_BYTES)
            while left and (got := len(line.recv(min(left, _CHUNK)))):
                left -= got
            if not left:
                line.sendall(b"k")


def ask_time(host: str, port: int, token: str, timeout_s: float) -> float:
    """Seconds by which the clock there is ahead of ours. Raises OSError."""
    answers = [_ask_time(host, port, token, timeout_s) for _ in range(_ASKS)]
    return min(answers)[1]  # of the quickest answer, which is the least uncertain


def _ask_time(host: str, port: int, token: str, timeout_s: float) -> tuple[float, float]:
    """Seconds of the round trip, and by which the clock there is ahead."""
    with socket.create_connection((host, port), timeout=timeout_s) as line:
        line.sendall(token.encode())
        sent = time.time()
        line.sendall(_CLOCK)
        (there,) = struct.unpack("!d", _receive(line, 8))
        back = time.time()
        return back - sent, float(there) - (sent + back) / 2


def measure(host: str, port: int, token: str, timeout_s: float, size: int = BULK_BYTES) -> float:
    """MB a second to the peer there, `size` bytes at once. Raises OSError."""
    block = bytes(_CHUNK)
    with socket.create_connection((host, port), timeout=timeout_s) as line:
        line.sendall(token.encode() + _BULK + struct.pack("!Q", size))
        start = time.perf_counter()
        for begin in range(0, size, _CHUNK):
            line.sendall(block[: size - begin])
        if _receive(line, 1) != b"k":
            raise OSError("the peer did not confirm the data")
        return size / 1e6 / (time.perf_counter() - start)


def _receive(line: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = line.recv(size - len(parts))
        if not part:
            raise ConnectionError("the connection was closed")
        parts += part
    return parts
