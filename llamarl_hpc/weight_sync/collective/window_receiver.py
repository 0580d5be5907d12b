"""A replica of several ranks receives once per node: into a window that the ranks there share.

    first rank of a node   background: receives into the window | main thread: says so in it
    the others             main thread: look into the window, and read what lies there in place

So what travels between nodes does not grow with the ranks on them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llamarl_hpc.channels.messages import SyncMember
from llamarl_hpc.config.schema import WeightSyncConfig
from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.placement import World
from llamarl_hpc.types import ParameterSpec
from llamarl_hpc.weight_sync.arena import StagedArena
from llamarl_hpc.weight_sync.base import StagedWeights
from llamarl_hpc.weight_sync.collective.group import connect_store, reason
from llamarl_hpc.weight_sync.collective.node_window import NodeWindow, shortage
from llamarl_hpc.weight_sync.collective.receiver import CollectiveReceiver
from llamarl_hpc.weight_sync.collective.rendezvous import Board, Watch, read_layout
from llamarl_hpc.weight_sync.plan import Arena

_LAYOUT_S = 30.0  # the trainer's layout is there before anybody hears of its store
_CLOSE_S = 3.0


class WindowReceiver:
    """On every rank of a replica (a `WeightReceiver`). `ranks`: those that fetch."""

    def __init__(
        self,
        *,
        config: WeightSyncConfig,
        executor: str,
        world: World,
        ranks: tuple[int, ...],
        address: str,
        specs: Sequence[ParameterSpec] | None = None,
    ) -> None:
        self._config, self._executor, self._world = config, executor, world
        self._address, self._specs, self.ranks = address, specs, ranks
        self._arena: Arena | None = None
        self._window: NodeWindow | None = None
        self._inner: CollectiveReceiver | None = None  # on the rank that fetches
        self._serial, self._version = 0, -1  # of the last `start`
        self._asked = self._heard = 0  # fetches that were begun, and that have ended
        self._is_due = False  # its result has not been told yet
        self._reads = False  # it has been handed out, and not been released
        self._problem = ""  # why nothing was begun

    def start(
        self, version: int, epoch: int, members: Sequence[SyncMember], store_address: str
    ) -> None:
        self._problem = self._open(store_address) if self._window is None else ""
        self._serial, self._version, self._is_due = self._serial + 1, version, True
        if self._window is None:
            return
        if not self._reads:
            self._window.let_go(self._serial - 1)
        if self._inner is not None:
            self._asked += 1
            self._inner.start(version, epoch, members, store_address)

    def poll(self) -> StagedWeights | None:
        if not self._is_due:
            return None
        checksum = self._outcome()
        if checksum is None:
            return None
        self._is_due, self._reads = False, True
        assert self._arena is not None and self._window is not None
        serial = self._serial
        return StagedArena(
            version=self._version,
            checksum=checksum,
            arena=self._arena,
            memory=self._window.memory,
            release=lambda: self._release(serial),
        )

    @property
    def memory(self) -> torch.Tensor:
        """For the fetch: where versions are to lie."""
        assert self._window is not None
        return self._window.memory

    def is_free(self) -> bool:
        """For the fetch, in its thread: whether nobody reads the version before."""
        return self._window is not None and self._window.is_free(self._serial - 1)

    def close(self) -> None:
        hangs = False
        if self._inner is not None:
            self._inner.close()
            hangs = not self._inner.is_quiet(_CLOSE_S)
        if self._window is not None:
            self._window.free(hangs=hangs)

    def _open(self, store_address: str) -> str:
        """Make the window, once it is known how large the model is; else why not. Collective."""
        node = self._world.node
        mine: tuple[Arena | None, str] = (None, "")
        if node.rank == 0:
            try:
                arena = self._read_arena(store_address)
                short = shortage(arena.num_bytes)
                mine = (None if short else arena, short or "")
            except (WeightSyncError, RuntimeError) as error:
                mine = (None, f"{self._executor} rank {self._world.rank}: {reason(error)}")
        self._arena, problem = node.bcast(mine)
        if self._arena is None:
            return str(problem)
        self._window = NodeWindow(node, self._arena.num_bytes)
        if node.rank == 0:
            self._inner = CollectiveReceiver(
                config=self._config,
                executor=self._executor,
                rank=self._world.rank,
                device="cpu",
                address=self._address,
                specs=self._specs,
                shared=self,
            )
        return ""

    def _read_arena(self, store_address: str) -> Arena:
        board = Board(connect_store(store_address, _LAYOUT_S))
        watch = Watch(
            board,
            what="reading the trainer's layout",
            timeout_s=_LAYOUT_S,
            is_cancelled=lambda: False,
        )
        return read_layout(board, watch).arena

    def _outcome(self) -> str | None:
        """The checksum, None while the version is under way. Raises WeightSyncError."""
        if self._problem:
            self._is_due = False
            raise WeightSyncError(self._problem)
        assert self._window is not None
        if self._inner is not None:
            self._tell(self._inner, self._window)
        result = self._window.result(self._serial)
        if result is None:
            return None
        is_there, text = result
        if not is_there:
            self._is_due = False
            raise WeightSyncError(text)
        return text

    def _release(self, serial: int) -> None:
        self._reads = False
        if self._window is not None:
            self._window.let_go(max(serial, self._serial - 1))

    def _tell(self, inner: CollectiveReceiver, window: NodeWindow) -> None:
        """Leave in the window what became of the fetch, once that is known."""
        problem, checksum = "", ""
        try:
            staged = inner.poll()
            if staged is None:
                return
            checksum = staged.checksum
            staged.release()  # the next fetch looks at the window itself
        except WeightSyncError as error:
            problem = str(error)
        self._heard += 1
        if self._heard == self._asked:  # not one that was asked for before the last `start`
            window.announce(self._serial, checksum=checksum, problem=problem)
