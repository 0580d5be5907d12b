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


SINFO = """gpu|64|256000|gpu:a100:4(S:0-1),nvme:1
gpu|128|128000|gpu:a40:8
cpu|48|190000+|(null)
login: welcome
"""


def check(answer: str = SCONTROL, code: int = 0, sinfo: str = "", **trainer: Any) -> None:
    memory = {"mem": "1G"} if any(key.startswith("mem") for key in trainer) else {}
    resources = {"trainer": trainer, "generator": memory, "reward": memory}  # all name it, or none
    config = {"data": {"tasks": [{"name": "chain_sum"}]}, "resources": resources}
    texts = {"scontrol": answer, "sinfo": sinfo}
    check_partitions(
        Config.model_validate(config),
        run=lambda argv: Answer(returncode=code, stdout=texts[argv[0]], stderr=""),
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


@pytest.mark.parametrize(
    "trainer",
    [
        {"partition": "gpu", "cpus_per_task": 128},
        {"partition": "gpu", "ntasks_per_node": 4, "cpus_per_task": 16, "gpus_per_node": 4},
        {"partition": "gpu", "gpus_per_node": 4, "gpu_type": "A100", "mem": "250G"},
        {"partition": "gpu", "gpus_per_node": 8, "gpu_request": "gres", "mem_per_gpu": "15G"},
        {"partition": "gpu", "cpus_per_task": 256, "options": {"overcommit": ""}},
        {"partition": "cpu", "mem": "0", "cpus_per_task": 48},
        {"partition": "cloud", "cpus_per_task": 999},
        {"partition": "cpu,gpu", "cpus_per_task": 64},
    ],
)
def test_what_a_node_has_passes(trainer: dict[str, Any]) -> None:
    check(sinfo=SINFO, **trainer)


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (
            {"partition": "gpu", "ntasks_per_node": 5, "cpus_per_task": 32},
            "'gpu' cannot take it: 160 cores of a node are asked for but its nodes have 128",
        ),
        (
            {"partition": "cpu", "mem_per_cpu": "4G", "cpus_per_task": 47},
            "192512 MiB of a node",
        ),
        ({"partition": "gpu", "gpus_per_node": 9}, "9 GPUs of a node are asked for but"),
        ({"partition": "gpu", "gpus_per_node": 5, "gpu_type": "a100"}, "its nodes have 4 at most"),
        (
            {"partition": "gpu", "gpus_per_node": 1, "gpu_type": "h100"},
            "GPUs of type h100 are asked for but there are those of type a100, a40",
        ),
        (
            {"partition": "cpu", "gpus_per_node": 1, "gpu_type": "h100"},
            "are none with a type",
        ),
        (
            {"partition": "gpu", "cpus_per_task": 100, "mem": "200G"},
            "no kind of node there has all that is asked of one: 100 cores, 204800 MiB",
        ),
    ],
)
def test_what_no_node_has_is_refused(trainer: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(sinfo=SINFO, **trainer)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_cores_above_what_the_partition_allows_of_a_node_are_refused() -> None:
    answer = SCONTROL.replace("State=UP", "MaxCPUsPerNode=16 State=UP")
    check(answer, sinfo=SINFO, partition="gpu", cpus_per_task=16)
    with pytest.raises(ConfigError, match="17 cores of a node are asked for but it allows 16"):
        check(answer, sinfo=SINFO, partition="gpu", cpus_per_task=17)
