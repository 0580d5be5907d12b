"""Weight sync over the network: broadcasts by the ranks that own the shards (NCCL or gloo).

    trainer, every rank   copies the pieces it sends into staging buffers -> training goes on
    trainer, background   agrees with the receivers (rendezvous.py), then broadcasts its buckets,
                          or what has changed of them (delta.py), and sums them meanwhile
    generator, background receives all buckets into one arena (receiver.py)

Nothing is gathered, and no trainer rank receives what another one sends. Who waits for whom: the
trainer's background threads for all members to arrive and to finish, generators for the trainer,
each with a deadline that names who is missing; `publish` waits for the transfer before it, never
for its own. A transfer that fails costs the members that version: receivers raise WeightSyncError
and keep their old weights; the trainer goes on (`failure` says what happened) and the next
transfer forms new groups of the processes that are then alive.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import msgspec
import torch
from torch._C._distributed_c10d import Backend, Work

from llamarl_hpc.channels.messages import SyncMember
from llamarl_hpc.config.schema import WeightSyncConfig
from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.placement import World
from llamarl_hpc.weight_sync.agreed_plan import agree_on_plan
from llamarl_hpc.weight_sync.background import run_in_background
from llamarl_hpc.weight_sync.base import PublishReceipt, Sent, WeightSource
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
    serve_store,
    use_device,
)
from llamarl_hpc.weight_sync.collective.loads import Load, broadcasts
from llamarl_hpc.weight_sync.collective.rendezvous import (
    POLL_S,
    VERDICT_S,
    Arrival,
    Board,
    Go,
    Layout,
    Watch,
    announce_loads,
    announce_sums,
    clean_up,
    judge,
    read_arrival,
    read_loads,
    read_sums,
)
from llamarl_hpc.weight_sync.collective.staging import Staging
from llamarl_hpc.weight_sync.verification import Verify, bucket_sums, checksum_of

_log = logging.getLogger(__name__)


class _Transfer:
    """One version on its way: what the background thread works on."""

    def __init__(
        self, *, number: int, version: int, epoch: int, members: Sequence[SyncMember]
    ) -> None:
        self.number, self.version, self.epoch = number, version, epoch
        self.sent: Future[Sent] = Future()
        self.receivers = [f"{m.executor} rank {r}" for m in members for r in m.ranks]
        self.cancelled = threading.Event()
        self.finished = threading.Event()
        self.verdict = ""  # what went wrong; "" while under way and when all went well


class CollectivePublisher:
    """On every trainer rank (a `WeightPublisher`). Making one is a collective call.

    `device` is where the bytes travel from: "cuda" for NCCL, "cpu" for gloo; `source_device`, where
    the weights are. `address`: this host's on the network that trainer and generators share.
    """

    def __init__(
        self,
        *,
        config: WeightSyncConfig,
        world: World,
        source: WeightSource,
        device: str,
        source_device: str,
        address: str,
    ) -> None:
        self._world, self._source, self._address = world, source, address
        self._device, self._from_gpu = current_device(device), source_device == "cuda"
        self._timeout_s = config.timeout_s
        self._server = serve_store(address, config.timeout_s) if world.is_leader else None
        self.store_address: str = world.bcast(
            f"{address}:{self._server.port}" if self._server else None
        )
        bucket_bytes = config.bucket_mb << 20
        self._arena, self._plan, self._plan_hash = agree_on_plan(world, source, bucket_bytes)
        self._mine = [bucket for bucket in self._plan if bucket.root == world.rank]
        self._verify: Verify = config.verify
        self._delta_bytes = bucket_bytes if config.delta == "auto" else None
        if world.is_leader:
            layout = Layout(
                arena=self._arena, buckets=self._plan, device=device, verify=config.verify
            )
            self._board().put("layout", layout)
        self._staging = self._new_staging()
        self._groups: dict[int, Backend] = {}  # this rank's own, under its rank
        self._formed = 0  # their group number
        self._agreed: tuple[int, list[str]] = (0, [])  # leader: group number and its processes
        self._served: dict[str, str] = {}  # leader: receiver -> the last request that was answered
        self._number = 0
        self._transfer: _Transfer | None = None

    @property
    def failure(self) -> str:
        """What went wrong in the last transfer that has ended; "" if it reached everybody."""
        return self._transfer.verdict if self._transfer else ""

    def publish(self, version: int, epoch: int, members: Sequence[SyncMember]) -> PublishReceipt:
        start = time.monotonic()
        self._end_last(epoch)
        self._snapshot(version)
        self._number += 1
        transfer = _Transfer(number=self._number, version=version, epoch=epoch, members=members)
        self._transfer, staging = transfer, self._staging
        if members:
            run_in_background(lambda: self._run(transfer, staging), "weights")
        else:
            transfer.sent.cancel()
            transfer.finished.set()
        return PublishReceipt(
            version=version,
            num_bytes=self._arena.num_bytes,
            seconds=time.monotonic() - start,
            sent=transfer.sent if self._world.is_leader else None,
        )

    def close(self) -> None:
        """Gives a transfer under way a few seconds to end."""
        if self._transfer is not None:
            self._transfer.finished.wait(VERDICT_S)
            self._transfer.cancelled.set()
            self._wait_until_heard(self._transfer)
        drop_groups(self._groups)
        self._staging = Staging((), self._device, pinned=False, delta_bytes=None)
        self._server = None

    def _new_staging(self) -> Staging:
        return Staging(
            self._mine,
            self._device,
            pinned=self._from_gpu and self._device.type == "cpu",
            delta_bytes=self._delta_bytes,
        )

    def _end_last(self, epoch: int) -> None:
        """Wait for the transfer before. Another epoch means that the controller has given somebody
        up, so then only for as long as the others may need to notice."""
        last = self._transfer
        if last is None:
            return
        patience_s = self._timeout_s + VERDICT_S if epoch == last.epoch else VERDICT_S
        if not last.finished.wait(patience_s):
            last.cancelled.set()
            if not last.finished.wait(2 * VERDICT_S):
                _log.warning("version %d is still stuck on its way; it is left alone", last.version)
                self._staging = self._new_staging()
                self._groups = {}

    def _snapshot(self, version: int) -> None:
        """Copy what this rank sends. Nothing leaves meanwhile: sending would take cores and
        bandwidth from what training waits for."""
        self._staging.take(self._source, version)
        if self._from_gpu:
            torch.cuda.synchronize()

    def _board(self) -> Board:
        return Board(connect_store(self.store_address, self._timeout_s))

    def _wait_until_heard(self, transfer: _Transfer) -> None:
        """Leader: the store goes with this process, so let the others read its verdict first."""
        if self._server is None or self._world.size == 1 or not transfer.receivers:
            return
        others = [f"trainer rank {rank}" for rank in range(1, self._world.size)]
        deadline = time.monotonic() + VERDICT_S
        with contextlib.suppress(WeightSyncError):
            board = self._board()
            while others and time.monotonic() < deadline:
                others = [o for o in others if board.get(f"heard/{transfer.number}/{o}") is None]
                time.sleep(POLL_S)

    # ------------------------------------------------------------------ background thread

    def _run(self, transfer: _Transfer, staging: Staging) -> None:
        groups = self._groups
        use_device(self._device)
        try:
            transfer.verdict = self._carry_out(transfer, staging, groups)
        except Exception as error:  # the store is gone: nobody is left to tell
            transfer.verdict = reason(error)
        if transfer.verdict:
            _log.warning(
                "version %d did not reach every generator: %s", transfer.version, transfer.verdict
            )
            drop_groups(groups)
            self._agreed = (0, [])
            transfer.sent.cancel()
        transfer.finished.set()

    def _carry_out(self, transfer: _Transfer, staging: Staging, groups: dict[int, Backend]) -> str:
        """Agree, send, and hear how it went; returns the verdict."""
        board, number = self._board(), transfer.number
        watch = Watch(
            board,
            what=f"sending version {transfer.version}",
            timeout_s=self._timeout_s,
            is_cancelled=transfer.cancelled.is_set,
        )
        watch.number = number
        problem = ""
        try:
            if self._world.is_leader:
                self._prepare(transfer, staging, board, watch)
            go = msgspec.json.decode(board.wait(f"go/{number}", watch), type=Go)
            self._send(go, transfer, staging, groups, board, watch)
            if self._world.is_leader:
                transfer.sent.set_result(self._summary(go, board, watch))
        except (WeightSyncError, RuntimeError) as error:
            problem = reason(error)
            board.put(f"failed/{number}", problem)
        board.put(f"end/{number}/trainer rank {self._world.rank}", problem)
        if self._world.is_leader:
            senders = [f"trainer rank {rank}" for rank in range(self._world.size)]
            participants = [*transfer.receivers, *senders]
            verdict = judge(board, number, participants, watch)
            clean_up(board, number - 2, participants)
            return verdict
        patience = Watch(
            board,
            what="the trainer's rank 0",
            timeout_s=self._timeout_s + 2 * VERDICT_S,
            is_cancelled=lambda: False,
        )
        verdict = board.wait(f"verdict/{number}", patience)
        board.put(f"heard/{number}/trainer rank {self._world.rank}", verdict)
        return verdict

    def _prepare(self, transfer: _Transfer, staging: Staging, board: Board, watch: Watch) -> None:
        """Leader: wait until every member asks for this version, then give the word."""
        requests: dict[str, Arrival] = {}
        try:
            while missing := [r for r in transfer.receivers if r not in requests]:
                watch()
                for receiver in missing:
                    arrival = read_arrival(board, receiver)
                    if arrival is not None and self._is_meant(arrival, transfer):
                        requests[receiver] = arrival
                time.sleep(POLL_S)
            self._check_plans(requests.values())
        except WeightSyncError as error:
            problem = f"{error}"
            if missing:
                problem = f"{', '.join(missing)} did not come to fetch it ({error})"
            board.put(f"failed/{transfer.number}", problem)
            raise WeightSyncError(problem) from error
        finally:  # those who came must hear of it either way
            processes = [requests[r].process for r in transfer.receivers if r in requests]
            if processes != self._agreed[1]:
                self._agreed = (transfer.number, processes)
            held = {request.holds for request in requests.values()}
            base = held.pop() if len(held) == 1 else None
            go = Go(
                number=transfer.number,
                group=self._agreed[0],
                receivers=transfer.receivers,
                base=base if staging.has_base(base) else None,
            )
            for receiver, arrival in requests.items():
                self._served[receiver] = arrival.request
                board.put(f"answer/{arrival.request}", go)
        board.put(f"go/{transfer.number}", go)

    def _check_plans(self, arrivals: Iterable[Arrival]) -> None:
        """Before the first byte: who cuts otherwise would take it for something else."""
        for arrival in arrivals:
            if arrival.plan != self._plan_hash:
                raise WeightSyncError(
                    f"{arrival.receiver} would receive by plan {arrival.plan} but the trainer "
                    f"sends by {self._plan_hash}"
                )

    def _is_meant(self, arrival: Arrival, transfer: _Transfer) -> bool:
        wanted = (arrival.version, arrival.epoch) == (transfer.version, transfer.epoch)
        return wanted and self._served.get(arrival.receiver) != arrival.request

    def _send(
        self,
        go: Go,
        transfer: _Transfer,
        staging: Staging,
        groups: dict[int, Backend],
        board: Board,
        watch: Callable[[], None],
    ) -> None:
        if not self._mine:
            return
        rank = self._world.rank
        if go.group != self._formed or rank not in groups:
            drop_groups(groups)
            self._formed = go.group
            groups[rank] = make_group(
                store_address=self.store_address,
                name=f"group/{go.group}/{rank}",
                rank=0,
                size=1 + len(go.receivers),
                device=self._device.type,
                own_address=self._address,
                timeout_s=min(self._timeout_s, MAX_OPERATION_S),
            )
        parcels = staging.parcels(go.base)
        if go.base is not None:
            loads = [Load(num_buckets=len(p.buckets), delta=p.delta) for p in parcels]
            announce_loads(board, go.number, rank, loads)
        window = Window([len(parcel.data) for parcel in parcels])
        under_way: deque[Work] = deque()
        sums: list[list[int]] = []
        for number, parcel in enumerate(parcels):
            while window.is_full(number):
                finish_work(under_way.popleft(), watch)
                window.finished()
            watch()
            under_way.append(broadcast(groups[rank], parcel.data))
            if self._verify != "off":
                for bucket in parcel.buckets:
                    where = self._mine[bucket], staging.buckets[bucket]
                    sums.append(bucket_sums(self._verify, transfer.version, self._arena, *where))
        if self._verify != "off":
            announce_sums(board, go.number, rank, sums)
        while under_way:
            finish_work(under_way.popleft(), watch)

    def _summary(self, go: Go, board: Board, watch: Callable[[], None]) -> Sent:
        """What all ranks have summed and sent."""
        sums: list[list[int]] = []
        if self._verify != "off":
            sums = read_sums(board, go.number, self._plan, watch)
        total = sent = sum(bucket.num_bytes for bucket in self._plan)
        if go.base is not None:
            loads = read_loads(board, go.number, self._plan, watch)
            sent = sum(one.num_bytes for one in broadcasts(self._plan, loads))
        checksum = checksum_of(self._verify, self._arena, sums)
        return Sent(checksum=checksum, share=sent / total if total else 0.0)
