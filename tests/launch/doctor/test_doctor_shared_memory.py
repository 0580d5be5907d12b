"""What doctor says about /dev/shm: from a config and the model's tensors to a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from llamarl_hpc.config.schema import Config
from llamarl_hpc.launch.doctor.finding import Finding
from llamarl_hpc.launch.doctor.probe import Report
from llamarl_hpc.launch.doctor.reports import Expected, Step, judge
from llamarl_hpc.launch.doctor.shared_memory import needs, version_bytes

MIB = 1 << 20
SHAPES = {  # 64 Mi numbers, three quarters of them in a layer
    "model.embed_tokens.weight": [16 * 1024, 1024],
    "model.layers.0.mlp.up_proj.weight": [48 * 1024, 1024],
}


def config(sync: dict[str, Any], **others: Any) -> Config:
    ranks = {"generator": {"ntasks_per_node": 2}}
    return Config.model_validate({"weight_sync": sync, "resources": ranks} | others)


def findings(asked: Config, free_mib: int, *, one_host: bool = True) -> list[Finding]:
    """With two nodes, of which the second has only `free_mib`."""
    wanted = needs(asked, SHAPES, one_host=one_host)
    steps = {
        role: Step(
            reports=[
                Report(role=role, rank=rank, host=f"{role}{rank}", shm_free=free * MIB, size=2)
                for rank, free in enumerate((1 << 20, free_mib))
            ],
            returncode=0,
            words="",
        )
        for role in ("trainer", "generator")
    }
    expected = {
        role: Expected(ranks=2, cpus=1, gpus=0, is_real=True, shm=wanted.get(role))
        for role in steps
    }
    return [one for one in judge(steps, expected) if one.name == "shared_memory"]


@pytest.mark.parametrize(
    ("sync", "verdict", "way_out"),
    [
        (
            {"transport": "auto"},
            "warn",
            "or the run goes on with weight_sync.transport: collective",
        ),
        ({"transport": "shared_memory"}, "fail", "or set weight_sync.transport: collective"),
    ],
)
def test_two_copies_must_fit_where_the_trainer_is(
    sync: dict[str, Any], verdict: str, way_out: str
) -> None:
    (short,) = findings(config(sync), free_mib=511)
    assert short.verdict == verdict and way_out in short.text
    wanted = "/dev/shm of trainer1 has 511 MiB free but two copies of the weights need 513 MiB"
    assert short.sentence == wanted
    (enough,) = findings(config(sync), free_mib=512)
    assert enough.verdict == "ok" and "512 MiB free, enough for two copies" in enough.sentence


def test_a_window_for_each_replica_must_fit_where_the_generators_are() -> None:
    asked = config({"transport": "collective"}, generator={"replicas": 3})
    (short,) = findings(asked, free_mib=767)
    assert short.verdict == "fail" and "or set weight_sync.replica_memory: parts" in short.text
    assert "generator1 has 767 MiB free but 3 windows for the weights need" in short.sentence
    (apart,) = findings(asked, free_mib=256, one_host=False)  # a node for each
    assert apart.verdict == "ok" and "enough for a window" in apart.sentence


@pytest.mark.parametrize(
    ("sync", "ranks"), [({"replica_memory": "parts"}, 2), ({"replica_memory": "window"}, 1)]
)
def test_broadcasts_to_each_rank_need_no_room(sync: dict[str, Any], ranks: int) -> None:
    resources = {"generator": {"ntasks_per_node": ranks}}
    asked = config({"transport": "collective"} | sync, resources=resources)
    assert findings(asked, free_mib=0) == []


@pytest.mark.parametrize(
    ("dtype", "quantization", "mib"),
    [("fp32", "none", 256), ("bf16", "none", 128), ("bf16", "int8", 32 + 48 + 48 * 4 / 1024)],
)
def test_a_version_is_in_the_dtype_in_which_it_travels(
    dtype: str, quantization: str, mib: float
) -> None:
    asked = config({}, trainer={"dtype": dtype}, generator={"quantization": quantization})
    assert version_bytes(asked, SHAPES) == mib * MIB
