"""Site profiles: precedence, what is refused, and that every fact names where it comes from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from llamarl_hpc.config.load import load_config, save_resolved
from llamarl_hpc.config.schema import Config
from llamarl_hpc.config.site import FOLDER, load_site, site_names
from llamarl_hpc.errors import ConfigError

ROOT = Path(__file__).parents[2]
PROFILE: dict[str, Any] = {
    "title": "Here",
    "launch": {
        "mpi": "pmix",
        "modules": ["module load here"],
        "env": {"NCCL_SOCKET_IFNAME": "hsn0", "NCCL_DEBUG": "WARN"},
    },
    "channels": {"interface": "hsn0"},
    "gpu_nodes": {"partition": "gpu", "gpu_request": "gres", "options": {"network": "x"}},
    "cpu_nodes": {"partition": "cpu", "qos": "small"},
}


def load(folder: Path, *overrides: str, **blocks: Any) -> Config:
    """A config that names the profile PROFILE unless `launch` says otherwise."""
    (folder / "here.yaml").write_text(yaml.safe_dump(blocks.pop("profile", PROFILE)))
    launch = {"site": str(folder / "here.yaml")} | blocks.pop("launch", {})
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({"data": {"path": "x.jsonl"}, "launch": launch, **blocks}))
    return load_config(file, overrides)


# ------------------------------------------------------------------ precedence


def test_a_profile_gives_what_the_config_leaves_open(tmp_path: Path) -> None:
    config = load(tmp_path, resources={"trainer": {"gpus_per_node": 4}})
    assert (config.launch.mpi, config.channels.interface) == ("pmix", "hsn0")
    assert config.launch.modules == ["module load here"]
    trainer, reward = config.resources.trainer, config.resources.reward
    assert (trainer.partition, trainer.gpu_request) == ("gpu", "gres")
    assert trainer.options == {"network": "x"}
    assert (reward.partition, reward.qos, reward.gpu_request) == ("cpu", "small", "gpus_per_node")


def test_what_the_config_says_wins_even_when_it_says_null(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "resources.reward.partition=mine",
        launch={"mpi": "pmi2", "env": {"NCCL_DEBUG": "INFO"}},
        channels={"interface": None},
        resources={"trainer": {"gpus_per_node": 4, "gpu_request": "gpus_per_task"}},
    )
    assert (config.launch.mpi, config.channels.interface) == ("pmi2", None)
    assert config.launch.env == {"NCCL_SOCKET_IFNAME": "hsn0", "NCCL_DEBUG": "INFO"}
    assert config.resources.trainer.gpu_request == "gpus_per_task"
    assert config.resources.reward.partition == "mine"


def test_in_one_job_the_partition_is_the_jobs_and_steps_only_ask_for_gpus(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        resources={"job": {"gpus_per_node": 4, "nodes": 2}, "trainer": {"gpus_per_node": 4}},
    )
    assert config.resources.job is not None and config.resources.job.partition == "gpu"
    assert config.resources.trainer.partition is None
    assert config.resources.trainer.gpu_request == "gres"


def test_the_copy_in_a_run_folder_needs_the_profile_no_more(tmp_path: Path) -> None:
    config = load(tmp_path, launch={"mpi": "pmi2"})
    copy = tmp_path / "resolved.yaml"
    save_resolved(config, copy)
    (tmp_path / "here.yaml").unlink()
    assert load_config(copy) == config
    with pytest.raises(ConfigError, match="keeps the settings of its site"):
        load_config(copy, ["launch.site=lumi"])


def test_a_profile_by_its_relative_path_is_remembered_by_its_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(tmp_path, "launch.site=here.yaml")
    assert config.launch.site == str(tmp_path / "here.yaml") and config.launch.mpi == "pmix"


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ({"gpu_node": {}}, r"unknown key 'gpu_node'; did you mean 'gpu_nodes'"),
        ({"limits": {"het_job": True}}, r"unknown key 'limits.het_job'; did you mean 'het_jobs'"),
        (
            {"gpu_nodes": {"partitions": "x"}},
            r"'gpu_nodes.partitions'; did you mean 'gpu_nodes.partit",
        ),
        ({"launch": {"cpu_bin": "x"}}, r"'launch.cpu_bin'; did you mean 'launch.cpu_bind'"),
        ({"launch": {"mpi": 3}}, r"launch.mpi: wanted a string, found 3"),
        ({"limits": {"het_jobs": "perhaps"}}, r"limits.het_jobs"),
    ],
)
def test_a_mistake_in_a_profile_names_the_nearest_key(
    tmp_path: Path, profile: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"here\.yaml.*{message}"):
        load(tmp_path, profile=PROFILE | profile)


def test_a_name_that_is_no_profile_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no site profile 'perlmuter'; did you mean 'perlmutt"):
        load(tmp_path, launch={"site": "perlmuter"})
    with pytest.raises(ConfigError, match=r"there are alps_clariden, frontier"):
        load(tmp_path, launch={"site": "zzz"})
    with pytest.raises(ConfigError, match=r"cannot read the profile .*none\.yaml"):
        load(tmp_path, launch={"site": str(tmp_path / "none.yaml")})


def test_a_container_must_get_its_image(tmp_path: Path) -> None:
    command = {"image": "rl.sif", "command": ["apptainer", "exec"]}
    with pytest.raises(ConfigError, match=r"container.image is rl.sif but neither .* '\{image\}'"):
        load(tmp_path, launch={"container": command})
    load(tmp_path, launch={"container": command | {"srun_args": ["--environment={image}"]}})


# ------------------------------------------------------------------ those that come with it


def test_the_profiles_lie_where_a_reader_and_where_a_wheel_looks_for_them() -> None:
    here = sorted(path.stem for path in (ROOT / "sbatch" / "sites").glob("*.yaml"))
    assert site_names() == here and len(here) == 8
    setup = (ROOT / "setup.cfg").read_text()
    assert "sites/*.yaml" in setup
    assert FOLDER.resolve() == (ROOT / "sbatch" / "sites").resolve()


@pytest.mark.parametrize("site", site_names())
def test_every_fact_names_a_page_or_says_that_it_has_none(site: str) -> None:
    profile = load_site(site)
    assert set(profile.sources) == set(profile.facts())
    known = re.compile(r"https://\S+( \(.*\))?|unsourced: check( https://\S+)?")
    if site == "generic":
        known = re.compile("default of the product")
    wrong = [source for source in profile.sources.values() if not known.fullmatch(source)]
    assert wrong == []


@pytest.mark.parametrize("site", [name for name in site_names() if name != "generic"])
def test_every_profile_says_that_nobody_ran_it_there(site: str) -> None:
    head = (FOLDER / f"{site}.yaml").read_text().splitlines()[0]
    assert "The product was NOT run there" in head
