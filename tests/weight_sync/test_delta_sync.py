"""Broadcasts of what has changed: same bits as without, and everything where bases differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sync_setup import SPECS, Trainer, members, receiver, wait_staged, weights

from llamarl_hpc.config.schema import WeightSyncConfig
from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.weight_sync.checksum import version_checksum
from llamarl_hpc.weight_sync.collective import landing
from llamarl_hpc.weight_sync.collective.receiver import CollectiveReceiver

CONFIG = WeightSyncConfig(timeout_s=15.0, bucket_mb=1, delta="auto")
NOTHING = slice(0, 0)


def trained(version: int, *, anew: slice = NOTHING) -> dict[str, torch.Tensor]:
    """As after `version` small steps: few elements differ from step to step, but for these of the
    rows of layers.1.weight."""
    tensors = weights(0)
    for step in range(1, version + 1):
        generator = torch.Generator().manual_seed(step)
        for tensor in tensors.values():
            flat = tensor.view(-1)
            some = torch.rand(len(flat), generator=generator) < 0.01
            some[step % len(flat)] = True
            flat[some] += 1.0
    tensors["layers.1.weight"][anew] = weights(100 + version)["layers.1.weight"][anew]
    return tensors


class Scene:
    """A trainer whose weights change little, and replicas that take them."""

    def __init__(self, *, size: int, sharded: bool, verify: str = "full") -> None:
        config = config_with(verify=verify)
        self.verify = verify
        self.trainer = Trainer(size=size, sharded=sharded, config=config)
        self.readers = [receiver(number, config) for number in range(3)]

    def send(self, version: int, to: list[int], **changes: Any) -> float:
        """Publish a version, compare every bit at the replicas; the share of bytes that went."""
        tensors, group = trained(version, **changes), members(*to)
        for number in to:
            self.readers[number].start(version, version, group, self.trainer.store_address)
        receipt = self.trainer.publish(version, group, version, tensors)
        for number in to:
            staged = wait_staged(self.readers[number])
            self._assert_holds(dict(staged.tensors()), tensors)
            if self.verify == "full":
                assert staged.checksum == version_checksum(SPECS, tensors)
            staged.release()
        assert receipt.sent is not None
        return receipt.sent.result(20).share

    @staticmethod
    def _assert_holds(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
        for name, tensor in expected.items():
            assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name

    def close(self) -> None:
        for reader in self.readers:
            reader.close()
        self.trainer.close()


def config_with(**changes: Any) -> WeightSyncConfig:
    return CONFIG.model_copy(update=changes)


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    scene = Scene(**request.param)
    yield scene
    scene.close()


LAYOUTS = [
    {"size": 1, "sharded": False, "verify": "off"},
    {"size": 2, "sharded": False, "verify": "sampled"},
    {"size": 2, "sharded": True},
]


@pytest.mark.parametrize("scene", LAYOUTS, indirect=True)
def test_what_has_changed_travels_and_every_bit_arrives(scene: Scene) -> None:
    assert scene.send(1, [0, 1]) == 1.0  # nobody holds anything yet
    for version in (2, 3, 4):
        assert 0 < scene.send(version, [0, 1]) < 0.1
    half = scene.send(5, [0, 1], anew=slice(150, 300))  # there everything, elsewhere deltas
    assert 0.25 < half < 0.75


@pytest.mark.parametrize("scene", LAYOUTS[2:], indirect=True)
def test_new_and_lagging_replicas_get_everything(scene: Scene) -> None:
    scene.send(1, [0, 1])
    assert scene.send(2, [0, 1]) < 0.1
    assert scene.send(3, [0, 1, 2]) == 1.0  # replica 2 is new
    assert scene.send(4, [0, 1, 2]) < 0.1
    assert scene.send(5, [0]) < 0.1
    assert scene.send(6, [0, 1]) == 1.0  # replica 1 holds version 4
    assert scene.send(7, [1, 0]) < 0.1
    scene.readers[0].close()
    scene.readers[0] = receiver(0, CONFIG)  # started anew under its name
    assert scene.send(8, [0, 1]) == 1.0
    assert scene.send(9, [2]) == 1.0  # it holds 4, the trainer only 8


@pytest.mark.parametrize("scene", LAYOUTS[2:], indirect=True)
def test_after_a_delta_that_went_wrong_everything_is_sent(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.send(1, [0])
    genuine = landing.apply

    def wrong(delta: Any, data: torch.Tensor, chart: Any, memory: torch.Tensor) -> None:
        genuine(delta, data, chart, memory)
        memory[4] ^= 1

    monkeypatch.setattr(landing, "apply", wrong)
    with pytest.raises(WeightSyncError, match="its checksum of embed"):
        scene.send(2, [0])
    monkeypatch.setattr(landing, "apply", genuine)
    assert scene.send(3, [0]) == 1.0
    assert scene.send(4, [0]) < 0.1


def test_a_base_that_was_damaged_in_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(size=1, sharded=False)
    scene.send(1, [0])
    reader: CollectiveReceiver = scene.readers[0]
    assert reader._landing is not None
    reader._landing.memory[1000] ^= 1
    with pytest.raises(WeightSyncError, match=r"its checksum of embed\.weight"):
        scene.send(2, [0])
    scene.close()
