"""What the controller writes into every file of rollouts about its configuration."""

from __future__ import annotations

from llamarl_hpc.controller.assemble import _provenance
from llamarl_hpc.storage.rollout_store import build
from llamarl_hpc.storage.rollout_store.encode import encode


def test_a_configuration_that_hdf5_cannot_hold_is_named_by_its_hash() -> None:
    assert _provenance("name: x\n") == "name: x\n"
    block = build.from_records([], reward_names=[], first_rollout_id=0)
    for text in ("a" * 32_768, "\u00e9" * 20_000):
        encode(block, {"config": _provenance(text)})
    assert _provenance("\u00e9" * 20_000).startswith("sha256 of config.yaml: ")
