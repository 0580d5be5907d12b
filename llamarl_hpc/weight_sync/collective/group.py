"""Process groups for weights: one per sending trainer rank, {that rank} and all generator ranks.

They are plain gloo or NCCL groups beside the trainer's default group (which belongs to DeepSpeed),
are never registered anywhere, and may be made and dropped at any time. A trainer rank so never
receives what another one sends, and several send at the same time.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch._C._distributed_c10d import (
    Backend,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
    Work,
)

from llamarl_hpc.weight_sync.background import run_in_background

WINDOW = 4  # broadcasts of the largest size that are under way at a time,
WINDOW_SMALL = 32  # and of any size
MAX_OPERATION_S = 60.0  # all have arrived by then, so a bucket that takes longer is a failure

_POLL_S, _MAX_POLL_S = 0.0005, 0.002  # others need the cores meanwhile


class Window:
    """How many broadcasts are begun before the first one has ended, they being handled in order.

    Enough that the network never waits for this process to be scheduled; bounded in bytes, because
    each may need a buffer. `sizes`: bytes of the buffer of each.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes, self._limit = sizes, WINDOW * max(sizes, default=0)
        self._first, self._bytes = 0, 0

    def is_full(self, number: int) -> bool:
        """Whether one must end before `number` begins. False means that it begins now."""
        full = number > self._first and (
            number - self._first >= WINDOW_SMALL or self._bytes + self._sizes[number] > self._limit
        )
        if not full:
            self._bytes += self._sizes[number]
        return full

    def finished(self) -> None:
        """The oldest one has ended."""
        self._bytes -= self._sizes[self._first]
        self._first += 1


def current_device(kind: str) -> torch.device:
    """ "cuda": the GPU that this process has chosen; "cpu"."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    )


def use_device(device: torch.device) -> None:
    """To be called in every new thread: a thread begins on the first GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def serve_store(address: str, timeout_s: float) -> TCPStore:
    """A key-value store that listens on a free port of this address only."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def connect_store(address: str, timeout_s: float) -> TCPStore:
    """Another connection to the store at "host:port". A thread that waits in one blocks only it."""
    host, _, port = address.rpartition(":")
    return TCPStore(
        host,
        int(port),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def make_group(
    *,
    store_address: str,
    name: str,
    rank: int,
    size: int,
    device: str,
    own_address: str,
    timeout_s: float,
) -> Backend:
    """Join the group `name`; returns when all `size` members have. Rank 0 is the one that sends.

    `timeout_s` bounds the meeting and every operation. `own_address`: where gloo listens.
    """
    store = PrefixStore(name, connect_store(store_address, timeout_s))
    if device == "cuda":
        return _nccl(store, rank, size, timeout_s)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=own_address)]
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(store: PrefixStore, rank: int, size: int, timeout_s: float) -> Backend:
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    # NCCL's own watchdog would end the process; `finish_work` gives up first and aborts the group.
    options._timeout = timedelta(seconds=10 * timeout_s)
    group = ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return group


def broadcast(group: Backend, tensor: torch.Tensor) -> Work:
    """Begin to send (rank 0) or receive `tensor`."""
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    work: Work = group.broadcast([tensor], options)  # type: ignore[attr-defined]
    return work


def finish_work(work: Work, check: Callable[[], None]) -> None:
    """Wait for `work`; `check` is called meanwhile and raises when waiting has become pointless."""
    pause_s = _POLL_S
    while not work.is_completed():
        check()
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _MAX_POLL_S)
    work.wait()


def reason(error: Exception) -> str:
    """What happened, without what gloo and c10d wrap around it: source lines, advice, stacks."""
    text = re.sub(r"^\[[^\]]*\.\w+:\d+\] ", "", str(error).partition("\n")[0])
    return text.partition(" This is typically caused")[0].rstrip(". ")


def drop_groups(groups: dict[int, Backend]) -> threading.Event:
    """Abort and free groups without waiting: what hangs in gloo ends only by its own timeout. The
    event tells when nothing of them writes into memory any more."""

    doomed = list(groups.values())
    groups.clear()
    dropped = threading.Event()

    def drop() -> None:
        while doomed:
            group = doomed.pop()
            with contextlib.suppress(RuntimeError):
                group.abort()
            del group  # gloo waits here for what hangs
        dropped.set()

    if doomed:
        run_in_background(drop, "drop-groups")
    else:
        dropped.set()
    return dropped
