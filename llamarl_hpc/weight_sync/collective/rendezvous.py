"""How trainer ranks and generator ranks agree on one transfer, through a small key-value store.

    generator rank  arrived/<receiver>   "I want version 7 of epoch 3 and hold 6: request R of
                    process P"
    trainer rank 0  waits until all receivers have arrived, then
                    answer/<R>, go/<n>   transfer n: receivers, group number, the version that all
                    hold and whose differences are sent
    trainer rank    loads/<n>/<rank>: which buckets it sends as differences, and their sizes
    trainer rank    sums/<n>/<rank>: what it has sent, piece by piece, while it is sent
    everybody       broadcasts, then end/<n>/<participant>: "" or what went wrong
    trainer rank 0  waits for all ends, then verdict/<n>: "" or who is to blame
    other trainers  heard/<n>/<participant>: the store may go now
    anybody         failed/<n> tells those who still wait to stop

A group number stands for a set of processes: while the same processes take part and all went well,
the process groups are used again; else they are made anew. So a replica that was restarted under
its old name is never mistaken for the dead one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import msgspec
from torch._C._distributed_c10d import TCPStore

from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.weight_sync.collective.group import reason
from llamarl_hpc.weight_sync.collective.loads import Load, roots
from llamarl_hpc.weight_sync.plan import Arena, Bucket
from llamarl_hpc.weight_sync.verification import Verify

_T = TypeVar("_T")

POLL_S = 0.005
_FIRST_POLL_S = 0.0005  # what does not come at once is looked for less and less often
VERDICT_S = 3.0  # how long those who failed wait to hear whose fault it was


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for every version."""

    arena: Arena
    buckets: list[Bucket]
    device: str  # "cpu": gloo, "cuda": NCCL
    verify: Verify


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    receiver: str  # "generator.1 rank 0"
    process: str  # another one after a restart
    request: str  # another one at every fetch
    version: int
    epoch: int
    plan: str  # hash of the one that it works by
    holds: int | None  # the version that lies whole in its memory


class Go(msgspec.Struct, frozen=True, kw_only=True):
    """The transfer begins. Receivers are ranks 1, 2, ... of every group, in this order."""

    number: int  # of the transfer
    group: int
    receivers: list[str]
    base: int | None  # deltas from this version are sent; None: everything is


class Board:
    """The store with our types in it. Not for two threads at a time: each takes its own."""

    def __init__(self, store: TCPStore) -> None:
        self._store = store
        store.set_timeout(timedelta(seconds=30))  # no call waits for a key that is not there

    def put(self, key: str, value: str | msgspec.Struct) -> None:
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        self._store.set(key, "=" + text)  # never empty

    def get(self, key: str) -> str | None:
        """The value, None while there is none. Raises WeightSyncError when the store is gone."""
        try:
            return self._store.get(key).decode()[1:] if self._store.check([key]) else None
        except RuntimeError as error:
            raise WeightSyncError(
                f"the trainer's store does not answer: {reason(error)}"
            ) from error

    def wait(self, key: str, check: Callable[[], None]) -> str:
        """The value as soon as it is there. `check` is called meanwhile and may raise."""
        pause_s = _FIRST_POLL_S
        while (value := self.get(key)) is None:
            check()
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, POLL_S)
        return value

    def forget(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._store.delete_key(key)


class Watch:
    """The `check` of everybody who waits in transfer `number`: deadline, cancellation, failure."""

    def __init__(
        self, board: Board, *, what: str, timeout_s: float, is_cancelled: Callable[[], bool]
    ) -> None:
        self.number: int | None = None  # once it is known
        self._board, self._what, self._is_cancelled = board, what, is_cancelled
        self._timeout_s, self._deadline = timeout_s, time.monotonic() + timeout_s
        self._looked_at = 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        if self._is_cancelled():
            raise WeightSyncError(f"{self._what} was given up")
        if now >= self._deadline:
            raise WeightSyncError(f"{self._what} was not done within {self._timeout_s:g} s")
        if self.number is not None and now - self._looked_at >= 0.1:
            self._looked_at = now
            if (failure := self._board.get(f"failed/{self.number}")) is not None:
                raise WeightSyncError(f"{self._what} failed: {failure}")


def announce_sums(board: Board, number: int, rank: int, sums: Sequence[Sequence[int]]) -> None:
    """The sums of a trainer rank's buckets, in the order of the plan."""
    board.put(f"sums/{number}/trainer rank {rank}", msgspec.json.encode(sums).decode())


def read_sums(
    board: Board, number: int, buckets: Sequence[Bucket], watch: Callable[[], None]
) -> list[list[int]]:
    """The announced sums of all buckets of the plan, as soon as every sender has them."""
    by_rank = {
        root: iter(_read(board, f"sums/{number}/trainer rank {root}", watch, list[list[int]]))
        for root in roots(buckets)
    }
    return [next(by_rank[bucket.root]) for bucket in buckets]


def announce_loads(board: Board, number: int, rank: int, loads: Sequence[Load]) -> None:
    """How a trainer rank sends its buckets, in the order of the plan."""
    board.put(f"loads/{number}/trainer rank {rank}", msgspec.json.encode(loads).decode())


def read_loads(
    board: Board, number: int, buckets: Sequence[Bucket], watch: Callable[[], None]
) -> dict[int, list[Load]]:
    """What the trainer ranks have announced, by rank, as soon as every sender has."""
    return {
        root: _read(board, f"loads/{number}/trainer rank {root}", watch, list[Load])
        for root in roots(buckets)
    }


def _read(board: Board, key: str, watch: Callable[[], None], kind: type[_T]) -> _T:
    return msgspec.json.decode(board.wait(key, watch), type=kind)


def read_layout(board: Board, watch: Callable[[], None]) -> Layout:
    return _read(board, "layout", watch, Layout)


def read_arrival(board: Board, receiver: str) -> Arrival | None:
    """The last request of a receiver, which may have been answered long ago."""
    text = board.get(f"arrived/{receiver}")
    return None if text is None else msgspec.json.decode(text, type=Arrival)


def judge(board: Board, number: int, participants: Sequence[str], watch: Callable[[], None]) -> str:
    """Wait until every participant has said how it ended, and publish the verdict.

    Returns "" or who failed, the silent ones first: one that died says nothing, and drags others
    with it who can only report a broken connection.
    """
    ends: dict[str, str] = {}
    deadline: float | None = None  # once something has failed
    while missing := [p for p in participants if p not in ends]:
        found = {p: end for p in missing if (end := board.get(f"end/{number}/{p}")) is not None}
        ends.update(found)
        if deadline is None and (failure := _failure(ends, watch)):
            board.put(f"failed/{number}", failure)
            deadline = time.monotonic() + VERDICT_S
        elif deadline is not None and time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    problems = [f"{participant}: {end}" for participant, end in ends.items() if end]
    if silent := [p for p in participants if p not in ends]:
        problems.insert(0, f"{', '.join(silent)} fell silent")
    verdict = "; ".join(problems[:2])
    board.put(f"verdict/{number}", verdict)
    return verdict


def _failure(ends: Mapping[str, str], watch: Callable[[], None]) -> str:
    try:
        watch()
    except WeightSyncError as error:
        return str(error)
    return next((end for end in ends.values() if end), "")


def clean_up(board: Board, number: int, participants: Sequence[str]) -> None:
    """Forget what nobody can be looking for any more."""
    board.forget([f"{key}/{number}" for key in ("go", "verdict", "failed")])
    kinds = ("end", "heard", "sums", "loads")
    board.forget([f"{key}/{number}/{p}" for key in kinds for p in participants])
