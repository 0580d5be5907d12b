"""The frozen reference: its log-probs are the policy's, however they are cut and whoever asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import write_tiny_model
from tiny_policy import tiny_config

from llamarl_hpc.placement import World
from llamarl_hpc.training.policy import build_policy
from llamarl_hpc.training.reference import Reference
from llamarl_hpc.types import ReferenceItem

CPU = torch.device("cpu")


def items(number: int = 5) -> list[ReferenceItem]:
    """Ragged groups of one to three completions."""
    rng = np.random.default_rng(0)

    def ids(most: int) -> Any:
        return rng.integers(0, 512, rng.integers(1, most)).astype(np.int32)

    return [
        ReferenceItem(
            group_id=10 + k, prompt_ids=ids(20), completion_ids=[ids(12) for _ in range(1 + k % 3)]
        )
        for k in range(number)
    ]


def reference(folder: Path, world: World, **trainer: Any) -> Reference:
    return Reference(tiny_config(**trainer), world, folder, device=CPU, offload=True)


def flat(found: Any) -> Any:
    return np.concatenate([logprobs for group in found for logprobs in group.logprobs])


def by_hand(folder: Path, temperature: float) -> Any:
    """Each completion alone, from the model's own logits."""
    model = build_policy(tiny_config(), folder).causal_lm
    rows = []
    for item in items():
        for completion in item.completion_ids:
            ids = torch.from_numpy(np.concatenate([item.prompt_ids, completion])).long()
            with torch.no_grad():
                logits = model(ids[None]).logits[0, :-1] / temperature
            chosen = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            rows.append(chosen[-len(completion) :].numpy())
    return np.concatenate(rows)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    "settings", [{}, {"micro_batch_tokens": 40}, {"share_prompt": False}], ids=str
)
def test_logprobs_are_those_of_the_model_however_they_are_packed(
    model_folder: Path, settings: dict[str, Any], temperature: float
) -> None:
    found = reference(model_folder, World(), **settings).logprobs(items(), temperature)
    assert [group.group_id for group in found] == [10, 11, 12, 13, 14]
    np.testing.assert_allclose(flat(found), by_hand(model_folder, temperature), atol=2e-6)


def test_ranks_compute_their_share_and_the_leader_gets_the_whole(model_folder: Path) -> None:
    """Two ranks in turn, with a communicator that hands the shares over."""

    class Gathered:
        def __init__(self) -> None:
            self.shares: list[Any] = []

        def gather(self, value: Any, root: int) -> Any:
            self.shares.insert(0, value)
            return self.shares if len(self.shares) == 2 else None

    comm = Gathered()
    whole = reference(model_folder, World()).logprobs(items(), 1.0)
    assert reference(model_folder, World(rank=1, size=2, comm=comm)).logprobs(items(), 1.0) == []
    two = reference(model_folder, World(rank=0, size=2, comm=comm)).logprobs(items(), 1.0)
    assert all(share for share in comm.shares)
    np.testing.assert_allclose(flat(two), flat(whole), atol=2e-6)


def test_it_becomes_another_policy_when_it_is_told(model_folder: Path, tmp_path: Path) -> None:
    frozen = reference(model_folder, World())
    before = flat(frozen.logprobs(items(), 1.0))
    frozen.load(4, write_tiny_model(tmp_path / "other", seed=1))
    after = flat(frozen.logprobs(items(), 1.0))
    assert frozen.step == 4 and np.abs(after - before).max() > 0.1
    assert all(not p.requires_grad for p in frozen._policy.parameters())


@pytest.mark.gpu
def test_an_offloaded_reference_takes_no_device_memory_between_uses(model_folder: Path) -> None:
    device = torch.device("cuda", 0)
    resident = Reference(tiny_config(), World(), model_folder, device=device, offload=False)
    expected = flat(resident.logprobs(items(), 1.0))
    del resident
    start = torch.cuda.memory_allocated()
    offloaded = Reference(tiny_config(), World(), model_folder, device=device, offload=True)
    found = flat(offloaded.logprobs(items(), 1.0))
    assert np.array_equal(found, expected)
    assert torch.cuda.memory_allocated() - start < 1 << 16  # buffers of the positions
    assert all(p.device.type == "cpu" for p in offloaded._policy.parameters())
