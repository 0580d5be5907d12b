"""One rank's part of the model and of the KV cache, and how the leader leads the other ranks.

The leader's engine calls `reserve`, `copy` and `forward`; each goes to all ranks, in one message
per forward pass, and the logits come back to the leader alone. The other ranks `follow`: they know
no requests, draw nothing and decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llamarl_hpc.generation.native.architecture import architecture_of
from llamarl_hpc.generation.native.kv_cache import KVCache
from llamarl_hpc.generation.native.model import NativeModel, PackedBatch
from llamarl_hpc.generation.native.model_config import load_config
from llamarl_hpc.generation.native.sharding import Share
from llamarl_hpc.generation.native.tensor_parallel import join_ranks
from llamarl_hpc.models.int8 import quantised
from llamarl_hpc.models.load import torch_dtype, weight_files
from llamarl_hpc.placement import World
from llamarl_hpc.types import TensorPart


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserve:
    """`KVCache.reserve`."""

    length: int
    used_slots: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """`KVCache.copy`."""

    source: int
    targets: Sequence[int]
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What every rank does: changes of its cache, then a forward pass."""

    changes: list[Reserve | Copy] = field(default_factory=list)
    batch: PackedBatch


class ModelRunner:
    """See the module. All ranks of `world` make one with the same arguments."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str | torch.dtype,
        slots: int,
        max_context: int,
        device: str,
        world: World,
        int8: bool = False,
    ) -> None:
        """Load this rank's part of the model in `folder`. Raises ConfigError if it cannot run."""
        config, where = load_config(folder), torch.device(device)
        arch = architecture_of(config, max_context=max_context)
        share = Share.of(arch, world.rank, world.size)
        own, kind = share.apply(arch), torch_dtype(dtype)
        self.vocab_size = arch.vocab_size
        self._world = world
        self._changes: list[Reserve | Copy] = []  # that the other ranks have not heard of yet
        self._cache = KVCache(
            layers=own.num_layers,
            slots=slots,
            max_length=max_context,
            kv_heads=own.num_kv_heads,
            head_dim=own.head_dim,
            dtype=kind,
            device=where,
        )
        widths = [
            Share.of(arch, rank, world.size).apply(arch).vocab_size for rank in range(world.size)
        ]
        self._model = NativeModel(
            arch,
            config,
            share=share,
            ranks=join_ranks(world, where, widths),
            max_context=max_context,
            dtype=kind,
            device=where,
            int8=int8,
        )
        tensors = _read_weights(folder, self._model.parts, whole_rows=int8)
        self.load_weights(quantised(tensors) if int8 else tensors)

    @property
    def parts(self) -> list[TensorPart]:
        """What this rank keeps of every weight; `load_weights` takes each whole, or so much."""
        return list(self._model.parts.values())

    @property
    def prefix_slot(self) -> int:
        return self._cache.prefix_slot

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy in a complete set; every rank its own. Raises WeightSyncError if it is none."""
        self._model.load_weights(tensors)

    # ------------------------------------------------------------------ the leader

    def reserve(self, length: int, used_slots: int) -> None:
        self._change(Reserve(length=length, used_slots=used_slots))

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        if targets:
            self._change(Copy(source=source, targets=targets, length=length))

    def forward(self, batch: PackedBatch) -> Tensor:
        """Logits [rows of batch.sampled_rows, vocabulary]."""
        if self._world.size > 1:
            self._world.share(Work(changes=self._changes, batch=batch))
            self._changes = []
        logits = self._model.forward(batch, self._cache)
        assert logits is not None
        return logits

    def _change(self, change: Reserve | Copy) -> None:
        self._apply(change)
        if self._world.size > 1:
            self._changes.append(change)

    # ------------------------------------------------------------------ the other ranks

    @torch.inference_mode()
    def follow(self, work: Work) -> None:
        for change in work.changes:
            self._apply(change)
        self._model.forward(work.batch, self._cache)

    def _apply(self, change: Reserve | Copy) -> None:
        if isinstance(change, Reserve):
            self._cache.reserve(change.length, change.used_slots)
        else:
            self._cache.copy(change.source, change.targets, change.length)


def _read_weights(
    folder: Path, parts: dict[str, TensorPart], *, whole_rows: bool
) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a model folder, one at a time; of those that are cut only the part, or its
    `whole_rows`, from which scales follow."""
    from safetensors import safe_open

    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if not name.endswith("rotary_emb.inv_freq"):  # old folders; computed here
                    part = parts.get(name)
                    cuts_rows = part is not None and part.dim == 1
                    yield name, _read(file, name, None if cuts_rows and whole_rows else part)


def _read(file: Any, name: str, part: TensorPart | None) -> Tensor:
    stored = file.get_slice(name)
    kept = slice(None)
    if part is not None and tuple(stored.get_shape()) == part.shape:  # else it will be refused
        kept = slice(part.start, part.end)
    read: Tensor = stored[:, kept] if part is not None and part.dim == 1 else stored[kept]
    return read
