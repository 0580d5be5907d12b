"""A toy replica of several ranks: what each keeps, and how they agree to switch."""

from __future__ import annotations

import time

import torch
from sync_setup import SHAPES, SPECS, weights

from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.placement import World
from llamarl_hpc.types import TensorPart
from llamarl_hpc.weight_sync.base import StagedWeights, WeightReceiver

COLUMNS = {"layers.0.weight"}
ROWS = {"embed.weight", "layers.1.weight"}


def toy_parts(rank: int, size: int) -> list[TensorPart]:
    """Uneven ones; what is not cut is kept whole, named or (the bias) not."""
    parts = []
    for spec in SPECS:
        if spec.name == "bias":
            continue
        dim, cut = int(spec.name in COLUMNS), spec.name in COLUMNS | ROWS
        length = spec.shape[dim]
        start, end = (rank * length // size, (rank + 1) * length // size) if cut else (0, length)
        parts.append(TensorPart(name=spec.name, shape=spec.shape, dim=dim, start=start, end=end))
    return parts


class ToyEngine:
    """Copies what a rank keeps out of whole tensors or exactly its parts."""

    def __init__(self, parts: list[TensorPart]) -> None:
        self.parts = {part.name: part for part in parts}
        self.version = -1
        self.held: dict[str, torch.Tensor] = {}
        self.came_whole = False

    def load(self, staged: StagedWeights) -> None:
        tensors = dict(staged.tensors())
        self.came_whole = all(t.shape == SHAPES[name][0] for name, t in tensors.items())
        self.held = {name: self._kept(name, t).clone() for name, t in tensors.items()}
        self.version = staged.version
        staged.release()

    def assert_holds(self, version: int) -> None:
        assert self.version == version
        expected = weights(version)
        assert set(self.held) == set(expected)
        for name, tensor in self.held.items():
            wanted = self._kept(name, expected[name])
            assert tensor.dtype == wanted.dtype and torch.equal(tensor, wanted), name

    def _kept(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        part = self.parts.get(name)
        if part is None or tuple(tensor.shape) == part.part_shape:
            return tensor
        assert tuple(tensor.shape) == part.shape
        return tensor.narrow(part.dim, part.start, part.end - part.start)


def outcome(receiver: WeightReceiver, timeout_s: float = 60.0) -> StagedWeights | str:
    """The staged version, or why there is none."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            staged = receiver.poll()
        except WeightSyncError as error:
            return str(error)
        if staged is not None:
            return staged
        time.sleep(0.005)
    raise AssertionError(f"nothing within {timeout_s} s")


def switch(world: World, receiver: WeightReceiver, engine: ToyEngine) -> list[str]:
    """As an executor does: all ranks load the version, or none. What went wrong, by rank."""
    mine = outcome(receiver)
    problems: list[str] = world.allgather(mine if isinstance(mine, str) else "")
    if not isinstance(mine, str):
        if any(problems):
            mine.release()
        else:
            engine.load(mine)
    return problems
