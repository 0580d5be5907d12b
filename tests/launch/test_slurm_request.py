"""From `resources` to the options of each component, and what is refused before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from llamarl_hpc.config.checks import check
from llamarl_hpc.config.schema import Config
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.launch.request import component_of, components_of


def config(**blocks: Any) -> Config:
    data = {"tasks": [{"name": "chain_sum"}]}
    return Config.model_validate({"data": data, **blocks})


def options(role: int, **resources: Any) -> dict[str, Any]:
    return dict(components_of(config(resources=resources))[role].options)


def test_every_size_is_written_in_every_component() -> None:
    parts = components_of(config(resources={"trainer": {"nodes": 2, "time": "90"}}))
    assert [part.name for part in parts] == ["trainer", "generator (2 replicas)", "reward"]
    for part, nodes in zip(parts, (2, 2, 1), strict=True):
        assert dict(part.options) == {
            "nodes": nodes,
            "ntasks-per-node": 1,
            "cpus-per-task": 1,
            "time": "0-01:30:00",
        }


def test_replicas_that_share_a_node_ask_for_one_node_with_room_for_all() -> None:
    settings = config(
        generator={"replicas": 6, "replicas_per_node": 4},
        resources={
            "generator": {"gpus_per_node": 1, "cpus_per_task": 8, "mem": "60G"},
            "trainer": {"mem": "0"},
            "reward": {"mem_per_cpu": "2G"},
        },
    )
    trainer, generator, reward = components_of(settings)
    assert generator.options["nodes"] == 2
    assert generator.options["ntasks-per-node"] == 4
    assert generator.options["gpus-per-node"] == "4"
    assert generator.options["mem"] == "245760M"
    assert trainer.options["mem"] == "0" and reward.options["mem-per-cpu"] == "2048M"


def test_a_replica_of_several_nodes_gets_them_for_itself() -> None:
    settings = config(generator={"replicas": 3}, resources={"generator": {"nodes": 2}})
    assert components_of(settings)[1].options["nodes"] == 6


@pytest.mark.parametrize(
    ("block", "name", "value"),
    [
        ({"gpus_per_node": 4}, "gpus-per-node", "4"),
        ({"gpus_per_node": 4, "gpu_type": "a100"}, "gpus-per-node", "a100:4"),
        ({"gpus_per_node": 4, "gpu_request": "gres"}, "gres", "gpu:4"),
        (
            {"gpus_per_node": 4, "gpu_request": "gres", "options": {"gres": "nvme:1"}},
            "gres",
            "gpu:4,nvme:1",
        ),
        (
            {"gpus_per_node": 4, "ntasks_per_node": 2, "gpu_request": "gpus_per_task"},
            "gpus-per-task",
            "2",
        ),
        ({"options": {"mail_type": "END"}}, "mail-type", "END"),
        ({"options": {"exclusive": ""}}, "exclusive", None),
        ({"constraint": "a100&nvlink"}, "constraint", "a100&nvlink"),
        ({"mem": "512K"}, "mem", "1M"),
    ],
)
def test_options_are_spelled_as_sbatch_does(block: dict[str, Any], name: str, value: Any) -> None:
    others = {"mem": "1G"} if "mem" in block else {}
    found = options(0, trainer=block, generator=others, reward=others)
    assert found[name] == value


@pytest.mark.parametrize("time", ["0", "UNLIMITED", None])
def test_without_a_limit_no_time_is_written(time: str | None) -> None:
    assert "time" not in options(0, trainer={"time": time})


def test_one_job_block_makes_an_ordinary_job() -> None:
    (job,) = components_of(config(resources={"job": {"nodes": 2, "gpus_per_node": 4}}))
    assert job.options["nodes"] == 2 and job.options["gpus-per-node"] == "4"


def test_parts_that_would_end_at_different_times_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer.time 1:00:00, resources.reward.time 30"):
        options(0, trainer={"time": "1:00:00"}, reward={"time": "30"})
    assert options(0, trainer={"time": "1:00:00"}, reward={"time": "60"})["time"] == "0-01:00:00"


def test_memory_is_for_all_parts_or_for_none() -> None:
    with pytest.raises(ConfigError, match=r"resources.generator, resources.reward name no memory"):
        options(0, trainer={"mem": "64G"})


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"mem": "64G", "mem_per_cpu": "2G"}, "mem and mem_per_cpu exclude one another"),
        ({"mem": "lots"}, "'lots' is not an amount of memory"),
        ({"time": "4h"}, "'4h' is not a time limit"),
        ({"gpu_type": "a100"}, "gpu_type is set but gpus_per_node is 0"),
        ({"options": {"accounts": "x"}}, "did you mean 'account'"),
        ({"options": {"slurm_account": "x"}}, "did you mean 'account'"),
        ({"options": {"account": "x"}}, "is a key of its own"),
        ({"options": {"output": "x"}}, "is set by the run itself"),
        ({"options": {"array": "0-3"}}, "is set by the run itself"),
        ({"options": {"gres": "gpu:a100:4"}}, "write gpus_per_node"),
        ({"options": {"gpus": "4"}}, "write gpus_per_node"),
        (
            {"gpus_per_node": 3, "ntasks_per_node": 2, "gpu_request": "gpus_per_task"},
            "cannot share evenly",
        ),
    ],
)
def test_what_slurm_would_refuse_or_misread_is_an_error_of_the_config(
    block: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"resources.reward.*{message}"):
        check(config(resources={"reward": block}))


def test_replicas_of_several_nodes_cannot_share_one() -> None:
    settings = config(generator={"replicas_per_node": 2}, resources={"generator": {"nodes": 2}})
    with pytest.raises(ConfigError, match=r"replicas_per_node is 2 but a replica has 2 nodes"):
        check(settings)


def test_a_reference_executor_is_a_component_of_its_own_after_the_others() -> None:
    own = {"algorithm": {"beta": 0.1}, "reference": {"placement": "executor"}}
    parts = components_of(config(**own, resources={"reference": {"nodes": 2, "gpus_per_node": 4}}))
    assert [part.name for part in parts][2:] == ["reward", "reference"]
    assert parts[3].options["nodes"] == 2 and parts[3].options["gpus-per-node"] == "4"
    assert component_of("reference") == 3
    for without in ({"algorithm": {"beta": 0.1}}, {"reference": {"placement": "executor"}}):
        assert len(components_of(config(**without))) == 3
