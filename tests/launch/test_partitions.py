"""What a partition would refuse is one sentence before anything is submitted."""

from __future__ import annotations

from typing import Any

import pytest

from llamarl_hpc.config.schema import Config
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.launch.partitions import check_partitions
from llamarl_hpc.launch.queue import Answer

SCONTROL = """PartitionName=gpu Default=NO MaxNodes=4 MaxTime=1-00:00:00 State=UP TotalNodes=100
PartitionName=cpu Default=YES MaxNodes=UNLIMITED MaxTime=UNLIMITED State=UP TotalNodes=8
PartitionName=old Default=NO MaxNodes=UNLIMITED MaxTime=01:00:00 State=DOWN TotalNodes=2
PartitionName=cloud Default=NO MaxNodes=UNLIMITED MaxTime=soon State=UP TotalNodes=0
"""


def check(answer: str = SCONTROL, code: int = 0, **trainer: Any) -> None:
    config = {"data": {"tasks": [{"name": "chain_sum"}]}, "resources": {"trainer": trainer}}
    check_partitions(
        Config.model_validate(config),
        run=lambda argv: Answer(returncode=code, stdout=answer, stderr=""),
    )


@pytest.mark.parametrize(
    "trainer",
    [
        {},
        {"partition": "gpu", "nodes": 4, "time": "1-00"},
        {"partition": "gpu", "time": "2-00", "qos": "long"},
        {"partition": "old,gpu", "time": "12:00:00"},
        {"partition": "cloud", "nodes": 64, "time": "7-00"},
        {"partition": "cpu", "nodes": 8},
    ],
)
def test_what_fits_passes(trainer: dict[str, Any]) -> None:
    check(**trainer)


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"partition": "gpus"}, "trainer: there is no partition 'gpus'; did you mean 'gpu'?"),
        ({"partition": "x"}, "no partition 'x'; there are cloud, cpu, gpu, old"),
        ({"partition": "old"}, "partition 'old' is DOWN"),
        ({"partition": "gpu", "time": "25:00:00"}, "1-01:00:00 is above the 1-00:00:00 of"),
        ({"partition": "gpu", "nodes": 5}, "5 nodes are asked for but partition 'gpu'"),
        ({"nodes": 9}, "9 nodes are asked for but partition 'cpu'"),
        ({"partition": "old,gpu", "nodes": 5}, "partition 'old' is DOWN"),
    ],
)
def test_what_never_starts_is_refused(trainer: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(**trainer)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_no_default_partition_is_said() -> None:
    with pytest.raises(ConfigError, match="no default partition; name one of gpu"):
        check("PartitionName=gpu Default=NO State=UP\n")


@pytest.mark.parametrize("answer", [("", 127), ("slurm_load_partitions error", 1), ("welcome", 0)])
def test_without_an_answer_nothing_is_checked(answer: tuple[str, int]) -> None:
    check(*answer, partition="anything", nodes=1000)
