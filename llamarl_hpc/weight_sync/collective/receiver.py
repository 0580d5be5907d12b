"""The generators' side of weight sync over the network; the whole picture is in publisher.py.

background thread   ask for the version -> (answer) -> receive all buckets (landing.py)
                    -> compare the checksum -> staged
main thread         poll -> the engine copies from it -> release
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
import torch
from torch._C._distributed_c10d import Backend, Work

from llamarl_hpc.channels.messages import SyncMember
from llamarl_hpc.config.schema import WeightSyncConfig
from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.types import ParameterSpec, TensorPart
from llamarl_hpc.weight_sync.arena import StagedArena, check_specs
from llamarl_hpc.weight_sync.background import Fetcher
from llamarl_hpc.weight_sync.base import StagedWeights
from llamarl_hpc.weight_sync.collective.group import (
    MAX_OPERATION_S,
    Window,
    broadcast,
    connect_store,
    current_device,
    drop_groups,
    finish_work,
    make_group,
    reason,
    use_device,
)
from llamarl_hpc.weight_sync.collective.landing import Landing, PartsLanding, WholeLanding
from llamarl_hpc.weight_sync.collective.loads import Broadcast, Load, broadcasts
from llamarl_hpc.weight_sync.collective.rendezvous import (
    POLL_S,
    VERDICT_S,
    Arrival,
    Board,
    Go,
    Layout,
    Watch,
    read_layout,
    read_loads,
    read_sums,
)
from llamarl_hpc.weight_sync.plan import plan_hash
from llamarl_hpc.weight_sync.verification import checksum_of, compare


class SharedArena(Protocol):
    """Memory that other processes read, and that is there for good."""

    @property
    def memory(self) -> torch.Tensor: ...

    def is_free(self) -> bool:
        """Whether nobody reads it any more."""


class CollectiveReceiver:
    """On every generator rank (a `WeightReceiver`).

    `specs`, if given, are the tensors that the generator needs; others are refused. `parts`: all
    that is to be held of them. `shared`: memory for versions that others read, too.
    """

    def __init__(
        self,
        *,
        config: WeightSyncConfig,
        executor: str,
        rank: int,
        device: str,
        address: str,
        specs: Sequence[ParameterSpec] | None = None,
        parts: Sequence[TensorPart] | None = None,
        shared: SharedArena | None = None,
    ) -> None:
        self._config, self._address, self._specs = config, address, specs
        self._parts, self._shared = parts, shared
        self._device = current_device(device)
        self.ranks: tuple[int, ...] = (rank,)
        self._me = f"{executor} rank {rank}"
        self._process = secrets.token_hex(8)
        self._layout: Layout | None = None
        self._plan = ""  # its hash
        self._landing: Landing | None = None
        self._holds: int | None = None  # the version that lies whole in it
        self._groups: dict[int, Backend] = {}  # by the trainer rank that sends
        self._formed = 0  # their group number
        self._dropped = drop_groups({})
        self._fetcher = Fetcher()

    def start(
        self, version: int, epoch: int, members: Sequence[SyncMember], store_address: str
    ) -> None:
        self._fetcher.submit(lambda: self._fetch(version, epoch, store_address))

    def poll(self) -> StagedWeights | None:
        return self._fetcher.poll()

    def close(self) -> None:
        self._fetcher.close()
        self._dropped = drop_groups(self._groups)
        self._landing = None

    def is_quiet(self, timeout_s: float) -> bool:
        """After `close`: whether nothing writes into memory any more."""
        return self._fetcher.has_ended and self._dropped.wait(timeout_s)

    # ------------------------------------------------------------------ background thread

    def _fetch(self, version: int, epoch: int, store_address: str) -> StagedWeights:
        use_device(self._device)
        try:
            board = Board(connect_store(store_address, self._config.timeout_s))
        except RuntimeError as error:
            raise WeightSyncError(
                f"{self._me} cannot reach the trainer's store at {store_address}: {reason(error)}"
            ) from error
        watch = Watch(
            board,
            what=f"version {version} for {self._me}",
            timeout_s=self._config.timeout_s,
            is_cancelled=self._fetcher.closing.is_set,
        )
        layout = self._learn_layout(board, watch)
        while self._shared is not None and not (self._shared.is_free() and self._dropped.is_set()):
            watch()
            time.sleep(POLL_S)
        request = secrets.token_hex(8)
        arrival = Arrival(
            receiver=self._me,
            process=self._process,
            request=request,
            version=version,
            epoch=epoch,
            plan=self._plan,
            holds=self._holds,
        )
        board.put(f"arrived/{self._me}", arrival)
        go = msgspec.json.decode(board.wait(f"answer/{request}", watch), type=Go)
        board.forget([f"answer/{request}"])
        watch.number = go.number
        try:
            watch()  # where somebody did not come, nobody forms a group either
            self._form_groups(layout, go, store_address)
            loads = None
            if go.base is not None:
                loads = read_loads(board, go.number, layout.buckets, watch)
            landing = self._landing = self._landing or self._make_landing(layout)
            sums = self._receive(layout, landing, version, loads, watch)
            checksum = self._verify(layout, go.number, sums, board, watch)
        except (WeightSyncError, RuntimeError) as error:
            raise self._give_up(version, error, go, board) from error
        self._holds = version if landing.keeps_all else None
        board.put(f"end/{go.number}/{self._me}", "")
        return StagedArena(
            version=version,
            checksum=checksum,
            arena=landing.arena,
            memory=landing.memory,
            release=self._fetcher.released,
        )

    def _learn_layout(self, board: Board, watch: Watch) -> Layout:
        if self._layout is None:
            layout = read_layout(board, watch)
            if self._specs is not None:
                check_specs(layout.arena.specs, self._specs)
            if layout.device != self._device.type:
                raise WeightSyncError(
                    f"the trainer sends from {layout.device} but {self._me} receives on "
                    f"{self._device.type}; give both GPUs or neither"
                )
            self._layout, self._plan = layout, plan_hash(layout.arena, layout.buckets)
        return self._layout

    def _make_landing(self, layout: Layout) -> Landing:
        if self._parts is not None:
            return PartsLanding(layout, self._device, self._parts)
        shared = None if self._shared is None else self._shared.memory
        return WholeLanding(layout, self._device, shared)

    def _receive(
        self,
        layout: Layout,
        landing: Landing,
        version: int,
        loads: Mapping[int, Sequence[Load]] | None,
        watch: Callable[[], None],
    ) -> list[list[int]]:
        """All buckets; their sums. Deltas (`loads`) are applied to what was there before."""
        watch()
        self._holds = None  # until all is there
        under_way: deque[tuple[Work, Broadcast, torch.Tensor]] = deque()
        sums: list[list[int]] = [[] for _ in layout.buckets]

        def finish() -> None:
            work, one, arrived = under_way.popleft()
            finish_work(work, watch)
            for number, found in zip(one.buckets, landing.take(one, arrived, version), strict=True):
                sums[number] = found

        coming = broadcasts(layout.buckets, loads)
        window = Window([landing.buffer_bytes(one) for one in coming])
        for number, one in enumerate(coming):
            while window.is_full(number):
                finish()
                window.finished()
            target = landing.target(one)
            under_way.append((broadcast(self._groups[one.root], target), one, target))
        while under_way:
            finish()
        return sums

    def _verify(
        self,
        layout: Layout,
        number: int,
        found: list[list[int]],
        board: Board,
        watch: Callable[[], None],
    ) -> str:
        """Compare with what the senders announce; returns the checksum."""
        if layout.verify == "off":
            return ""
        announced = read_sums(board, number, layout.buckets, watch)
        for place, bucket in enumerate(layout.buckets):
            compare(place, bucket, found=found[place], announced=announced[place])
        return checksum_of(layout.verify, layout.arena, found)

    def _form_groups(self, layout: Layout, go: Go, store_address: str) -> None:
        if go.group == self._formed and self._groups:
            return
        drop_groups(self._groups)
        self._formed = go.group
        for root in sorted({bucket.root for bucket in layout.buckets}):
            self._groups[root] = make_group(
                store_address=store_address,
                name=f"group/{go.group}/{root}",
                rank=1 + go.receivers.index(self._me),
                size=1 + len(go.receivers),
                device=self._device.type,
                own_address=self._address,
                timeout_s=min(self._config.timeout_s, MAX_OPERATION_S),
            )

    def _give_up(self, version: int, error: Exception, go: Go, board: Board) -> WeightSyncError:
        """Tell the others, hear the verdict, and start from scratch next time."""
        self._dropped = drop_groups(self._groups)
        self._holds = None
        self._landing = None  # what hangs may still write into the old one
        verdict: str | None = None
        with contextlib.suppress(WeightSyncError, RuntimeError):
            board.put(f"failed/{go.number}", reason(error))
            board.put(f"end/{go.number}/{self._me}", reason(error))
            deadline = time.monotonic() + VERDICT_S + 3.0
            while verdict is None and time.monotonic() < deadline:
                verdict = board.get(f"verdict/{go.number}")
                time.sleep(POLL_S)
        return WeightSyncError(
            f"version {version} did not reach {self._me} whole: "
            f"{verdict or f'the trainer fell silent ({reason(error)})'}"
        )
