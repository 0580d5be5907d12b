"""The generators' side of weight sync over the network; the whole picture is in collective.py.

background thread   ask for the version -> (answer) -> receive all buckets into one arena
                    -> compare the checksum -> staged
main thread         poll -> the engine copies from the arena -> release
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch._C._distributed_c10d import Backend, Work

from llamarl_hpc.channels.messages import SyncMember
from llamarl_hpc.config.schema import WeightSyncConfig
from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.types import ParameterSpec
from llamarl_hpc.weight_sync.arena import StagedArena, arena_checksum, check_specs
from llamarl_hpc.weight_sync.background import Fetcher
from llamarl_hpc.weight_sync.base import StagedWeights
from llamarl_hpc.weight_sync.group import (
    MAX_OPERATION_S,
    WINDOW,
    broadcast,
    connect_store,
    current_device,
    drop_groups,
    finish_work,
    make_group,
    use_device,
)
from llamarl_hpc.weight_sync.plan import Bucket, arena_start
from llamarl_hpc.weight_sync.rendezvous import (
    POLL_S,
    VERDICT_S,
    Arrival,
    Board,
    Go,
    Layout,
    Watch,
)


class CollectiveReceiver:
    """On every generator rank (a `WeightReceiver`).

    `specs`, if given, are the tensors that the generator needs; others are refused.
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
    ) -> None:
        self._config, self._address, self._specs = config, address, specs
        self._device = current_device(device)
        self._me = f"{executor} rank {rank}"
        self._process = secrets.token_hex(8)
        self._layout: Layout | None = None
        self._memory: torch.Tensor | None = None
        self._groups: dict[int, Backend] = {}  # by the trainer rank that sends
        self._formed = 0  # their group number
        self._fetcher = Fetcher()

    def start(
        self, version: int, epoch: int, members: Sequence[SyncMember], store_address: str
    ) -> None:
        self._fetcher.submit(lambda: self._fetch(version, epoch, store_address))

    def poll(self) -> StagedWeights | None:
        return self._fetcher.poll()

    def close(self) -> None:
        self._fetcher.close()
        drop_groups(self._groups)
        self._memory = None

    # ------------------------------------------------------------------ background thread

    def _fetch(self, version: int, epoch: int, store_address: str) -> StagedWeights:
        use_device(self._device)
        try:
            board = Board(connect_store(store_address, self._config.timeout_s))
        except RuntimeError as error:
            raise WeightSyncError(
                f"{self._me} cannot reach the trainer's store at {store_address}: {error}"
            ) from error
        watch = Watch(
            board,
            what=f"version {version} for {self._me}",
            timeout_s=self._config.timeout_s,
            is_cancelled=self._fetcher.closing.is_set,
        )
        layout = self._learn_layout(board, watch)
        request = secrets.token_hex(8)
        arrival = Arrival(
            receiver=self._me, process=self._process, request=request, version=version, epoch=epoch
        )
        board.put(f"arrived/{self._me}", arrival)
        go = msgspec.json.decode(board.wait(f"answer/{request}", watch), type=Go)
        board.forget([f"answer/{request}"])
        watch.number = go.number
        try:
            memory = self._receive(layout, go, store_address, watch)
        except (WeightSyncError, RuntimeError) as error:
            raise self._give_up(version, error, go, board) from error
        board.put(f"end/{go.number}/{self._me}", "")
        return StagedArena(
            version=version,
            checksum=go.checksum,
            arena=layout.arena,
            memory=memory,
            release=self._fetcher.released,
        )

    def _learn_layout(self, board: Board, watch: Watch) -> Layout:
        if self._layout is None:
            layout = msgspec.json.decode(board.wait("layout", watch), type=Layout)
            if self._specs is not None:
                check_specs(layout.arena.specs, self._specs)
            if layout.device != self._device.type:
                raise WeightSyncError(
                    f"the trainer sends from {layout.device} but {self._me} receives on "
                    f"{self._device.type}; give both GPUs or neither"
                )
            self._layout = layout
        return self._layout

    def _receive(
        self, layout: Layout, go: Go, store_address: str, watch: Callable[[], None]
    ) -> torch.Tensor:
        """All buckets, in the plan's order, into the arena; verified."""
        watch()
        self._form_groups(layout, go, store_address)
        if self._memory is None:
            self._memory = torch.empty(
                layout.arena.num_bytes, dtype=torch.uint8, device=self._device
            )
        memory = self._memory
        under_way: deque[tuple[Work, Bucket, torch.Tensor | None]] = deque()
        for bucket in layout.buckets:
            under_way.append(self._begin(layout, bucket, memory))
            if len(under_way) == WINDOW:
                self._finish(layout, *under_way.popleft(), memory, watch)
        while under_way:
            self._finish(layout, *under_way.popleft(), memory, watch)
        if self._config.verify:
            found = arena_checksum(layout.arena, memory)
            if found != go.checksum:
                raise WeightSyncError(
                    f"its checksum is {found} but the trainer's is {go.checksum}; the old weights "
                    "stay in use"
                )
        return memory

    def _begin(
        self, layout: Layout, bucket: Bucket, memory: torch.Tensor
    ) -> tuple[Work, Bucket, torch.Tensor | None]:
        """Receive straight into the arena where the bucket lies there in one piece."""
        start = arena_start(layout.arena, bucket)
        if start is not None:
            target, scratch = memory[start : start + bucket.num_bytes], None
        else:
            scratch = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self._device)
            target = scratch
        return broadcast(self._groups[bucket.root], target), bucket, scratch

    def _finish(
        self,
        layout: Layout,
        work: Work,
        bucket: Bucket,
        scratch: torch.Tensor | None,
        memory: torch.Tensor,
        watch: Callable[[], None],
    ) -> None:
        finish_work(work, watch)
        if scratch is None:
            return
        for piece in bucket.pieces:
            at = layout.arena.position(piece.name, piece.dtype, piece.start)
            memory[at : at + piece.num_bytes] = scratch[piece.offset :][: piece.num_bytes]

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
        drop_groups(self._groups)
        self._memory = None  # a hanging operation may still write into the old one
        verdict: str | None = None
        with contextlib.suppress(WeightSyncError, RuntimeError):
            board.put(f"failed/{go.number}", str(error))
            board.put(f"end/{go.number}/{self._me}", str(error))
            deadline = time.monotonic() + VERDICT_S + 3.0
            while verdict is None and time.monotonic() < deadline:
                verdict = board.get(f"verdict/{go.number}")
                time.sleep(POLL_S)
        return WeightSyncError(
            f"version {version} did not reach {self._me} whole: "
            f"{verdict or f'the trainer fell silent ({error})'}"
        )
