"""Scores groups in worker processes that can be killed: no completion can stop the scoring.

    submit(item) -> queue -> idle worker -> one reply per call -> collect() -> GroupScores

A worker makes one call at a time, and the pool knows which. A call that takes too long, takes too
much memory or crashes costs its worker, which is replaced, and its completion scores 0 with the
reason. When such a call was about several completions (a function of the user's gets a whole
group), it is repeated one by one to find the one at fault. An exception is different: it means
that the function is broken, so the whole group fails with `error`.

Workers are new Python processes, never forks (a fork of an MPI rank is undefined), and nothing
here uses signals or threads: limits hold wherever the pool is used. Its deadlines are looked at in
`collect`, so call that regularly. The thread that starts the pool must live as long as the pool.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

import msgspec

from llamarl_hpc.channels.messages import GroupScores, ScoreItem
from llamarl_hpc.config.schema import Config
from llamarl_hpc.errors import ConfigError, LlamarlError
from llamarl_hpc.rewards.base import RewardSpec, specs, total
from llamarl_hpc.rewards.worker import MEMORY, Reply, Setup, Work

_START_TIMEOUT_S = 120.0  # imports of the user's modules included
_MAX_FAILED_STARTS = 3  # in a row

# A worker is no rank: what the launcher and we say to ranks must not reach it.
_RANK_VARIABLES = ("PMI_", "PMIX_", "OMPI_", "HYDRA_", "HYDI_", "MPIR_", "LLAMARL_EXECUTOR")


@dataclass(slots=True)
class _Group:
    """A group on its way through the pool."""

    item: ScoreItem
    scores: list[list[float | None]]  # [reward][completion]
    reasons: list[str]  # [completion] why a limit made it 0
    open_calls: int = 0
    error: str = ""
    t_start: float = 0.0  # Unix time of the first call; 0.0 before


@dataclass(frozen=True, slots=True)
class _Call:
    reward: int
    completions: tuple[int, ...]


@dataclass(slots=True)
class _Batch:
    """Calls of one group that go to one worker together."""

    group: _Group
    calls: deque[_Call]  # the first is the one being made


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    deadline: float  # monotonic; of the start or of the call being made
    ready: bool = False
    batch: _Batch | None = None


@dataclass(slots=True)
class _State:
    workers: list[_Worker] = field(default_factory=list)
    queue: deque[_Batch] = field(default_factory=deque)
    done: list[GroupScores] = field(default_factory=list)
    failed_starts: int = 0


class RewardPool:
    """`config.reward_pool.workers` processes that score what is submitted."""

    def __init__(self, config: Config) -> None:
        self._limits = config.reward_pool
        self._rewards: list[RewardSpec] = specs(config.rewards)
        self._setup = msgspec.msgpack.encode(
            Setup(self._rewards, config.data.answer, self._limits.memory_mb)
        )
        self._state = _State()

    def start(self) -> None:
        """Start the workers, wait until all are ready. Raises ConfigError if a reward cannot be."""
        state = self._state
        while len(state.workers) < self._limits.workers:
            state.workers.append(self._new_worker())
        try:
            while not all(worker.ready for worker in state.workers):
                self._advance(_START_TIMEOUT_S)
        except LlamarlError:
            self.close()
            raise

    def submit(self, item: ScoreItem) -> None:
        """Queue a group. Starts the pool if that was not done."""
        if not self._state.workers:
            self.start()
        number = len(item.completions)
        group = _Group(
            item=item,
            scores=[[None] * number for _ in self._rewards],
            reasons=[""] * number,
        )
        calls = [
            _Call(index, chosen)
            for index, spec in enumerate(self._rewards)
            for chosen in _parts(number, one_by_one=spec.one_by_one)
        ]
        group.open_calls = len(calls)
        if calls:
            self._state.queue.append(_Batch(group, deque(calls)))
        else:
            self._finish(group)

    def collect(self, timeout_s: float) -> list[GroupScores]:
        """Groups that are done, in the order they were done; waits up to `timeout_s` for one."""
        end = time.monotonic() + timeout_s
        while not self._state.done:
            left = end - time.monotonic()
            self._advance(max(left, 0.0))
            if left <= 0.0:
                break
        done, self._state.done = self._state.done, []
        return done

    def close(self) -> None:
        """End the workers; what was not collected is forgotten. Idempotent."""
        for worker in self._state.workers:
            _kill(worker)
        self._state = _State()

    @property
    def worker_pids(self) -> list[int]:
        return [worker.process.pid for worker in self._state.workers]

    # -------------------------------------------------------------------- one round

    def _advance(self, timeout_s: float) -> None:
        """Hand out work, take what arrives within `timeout_s`, enforce the deadlines."""
        state = self._state
        self._hand_out()
        busy = [w for w in state.workers if w.batch is not None or not w.ready]
        now = time.monotonic()
        until = min([now + timeout_s, *(worker.deadline for worker in busy)])
        by_connection = {worker.connection: worker for worker in state.workers}
        for connection in wait(list(by_connection), max(until - now, 0.0)):
            assert isinstance(connection, Connection)
            self._receive(by_connection[connection])
        for worker in [w for w in state.workers if w.batch is not None or not w.ready]:
            if time.monotonic() >= worker.deadline:
                self._replace(worker, self._time_limit(worker))
        self._hand_out()

    def _hand_out(self) -> None:
        for worker in self._state.workers:
            if worker.ready and worker.batch is None and self._state.queue:
                batch = self._state.queue.popleft()
                batch.group.t_start = batch.group.t_start or time.time()
                item = batch.group.item
                calls = [(call.reward, list(call.completions)) for call in batch.calls]
                work = Work(item.prompt, dict(item.columns), item.completions, calls)
                worker.batch = batch
                worker.deadline = self._deadline(batch)
                with contextlib.suppress(OSError):  # it is dead: its connection says so next
                    worker.connection.send_bytes(msgspec.msgpack.encode(work, enc_hook=str))

    def _receive(self, worker: _Worker) -> None:
        """One reply of a worker, or its death."""
        try:
            reply = msgspec.msgpack.decode(worker.connection.recv_bytes(), type=Reply)
        except (EOFError, OSError):
            self._replace(worker, f"the worker crashed (exit code {_exit_code(worker)})")
            return
        if not worker.ready:
            if reply.failed:
                raise ConfigError(reply.failed)
            worker.ready, self._state.failed_starts = True, 0
        elif reply.failed == MEMORY:
            self._replace(worker, f"memory limit {self._limits.memory_mb} MB")
        else:
            self._take(worker, reply)

    def _take(self, worker: _Worker, reply: Reply) -> None:
        batch = worker.batch
        assert batch is not None
        call = batch.calls.popleft()
        batch.group.error = batch.group.error or reply.failed
        scores = batch.group.scores[call.reward]
        for index, score in zip(call.completions, reply.scores, strict=False):  # none if it failed
            scores[index] = score
        self._close_call(batch.group)
        if batch.calls:
            worker.deadline = self._deadline(batch)
        else:
            worker.batch = None

    # -------------------------------------------------------------------- limits

    def _deadline(self, batch: _Batch) -> float:
        return time.monotonic() + self._limits.timeout_s * len(batch.calls[0].completions)

    def _time_limit(self, worker: _Worker) -> str:
        if worker.ready:
            return f"time limit {self._limits.timeout_s:g} s"
        return f"it was not ready within {_START_TIMEOUT_S:g} s"

    def _replace(self, worker: _Worker, reason: str) -> None:
        """Kill a worker, start another, and settle the call that it was making."""
        _kill(worker)
        state = self._state
        if not worker.ready:
            state.failed_starts += 1
            if state.failed_starts >= _MAX_FAILED_STARTS:
                raise LlamarlError(
                    f"{state.failed_starts} reward workers in a row could not start: {reason}; "
                    "see the lines above in this log"
                )
        state.workers[state.workers.index(worker)] = self._new_worker()
        if worker.batch is not None:
            self._settle(worker.batch, reason)

    def _settle(self, batch: _Batch, reason: str) -> None:
        """The first call of `batch` cost its worker: score it 0, or repeat it one by one."""
        group, call = batch.group, batch.calls.popleft()
        if len(call.completions) == 1:
            (index,) = call.completions
            group.scores[call.reward][index] = 0.0
            group.reasons[index] = reason
            self._close_call(group)
        else:
            batch.calls.extendleft(_Call(call.reward, (i,)) for i in reversed(call.completions))
            group.open_calls += len(call.completions) - 1
        if batch.calls:
            self._state.queue.appendleft(batch)

    def _new_worker(self) -> _Worker:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "llamarl_hpc.rewards.worker"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_RANK_VARIABLES)}
        with theirs:
            process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward function prints goes to the log
                pass_fds=[theirs.fileno()],
                process_group=0,  # what a reward function starts is killed with its worker
                env={**environment, "OMP_NUM_THREADS": "1"},
            )
        with contextlib.suppress(OSError):
            ours.send_bytes(self._setup)
        return _Worker(process, ours, time.monotonic() + _START_TIMEOUT_S)

    # -------------------------------------------------------------------- results

    def _close_call(self, group: _Group) -> None:
        group.open_calls -= 1
        if group.open_calls == 0:
            self._finish(group)

    def _finish(self, group: _Group) -> None:
        scores = group.scores
        if group.error:
            scores = [[0.0] * len(row) for row in scores]
        now = time.time()
        self._state.done.append(
            GroupScores(
                purpose=group.item.purpose,
                group_id=group.item.group_id,
                components={
                    spec.name: row for spec, row in zip(self._rewards, scores, strict=True)
                },
                total=total([spec.weight for spec in self._rewards], scores),
                error=group.error,
                reasons=group.reasons,
                t_start=group.t_start or now,
                t_end=now,
            )
        )


def check_rewards(config: Config) -> None:
    """Raise ConfigError when a Python reward cannot be imported or is no reward function.

    It is imported in a worker, as it will be in the run, and not here.
    """
    if any(reward.kind == "python" for reward in config.rewards):
        limits = config.reward_pool.model_copy(update={"workers": 1})
        pool = RewardPool(config.model_copy(update={"reward_pool": limits}))
        pool.start()
        pool.close()


def _parts(number: int, *, one_by_one: bool) -> list[tuple[int, ...]]:
    everything = tuple(range(number))
    if one_by_one:
        return [(index,) for index in everything]
    return [everything] if everything else []


def _kill(worker: _Worker) -> None:
    """End a worker and what it started. Returns when it is gone."""
    worker.connection.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.wait()


def _exit_code(worker: _Worker) -> int | None:
    try:
        return worker.process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        return None
