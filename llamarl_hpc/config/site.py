"""Site profiles: what a cluster wants, so that its users need not write it.

    explicit key of the config  >  profile (`launch.site`)  >  default

A profile is a YAML file of values under the names of the config: `launch`, `channels`, `runs_dir`,
and what `resources` say of nodes with and without GPUs. Beside them stand known limits, and for
each fact the public page that it comes from. `sbatch/sites/` holds those that come with the
product; a path in place of the name takes one's own.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from llamarl_hpc.config.blocks.base import Block
from llamarl_hpc.config.mistakes import sentences
from llamarl_hpc.config.schema import Config, ResourcesConfig
from llamarl_hpc.errors import ConfigError

FOLDER = Path(__file__).parents[1] / "sites"  # a link to sbatch/sites, a folder in a wheel
_ENDINGS = (".yaml", ".yml")
_ROLES = [name for name in ResourcesConfig.model_fields if name != "job"]


class SiteLimits(Block):
    """What the site is known to allow; null: not known."""

    het_jobs: bool | None = None  # heterogeneous jobs
    requeue: bool | None = None  # false: a run goes on in new jobs, unless the config says how
    max_time: str | None = None  # on the partitions that the profile names, as Slurm writes it
    notes: list[str] = Field(default_factory=list)  # sentences for people


class SiteProfile(Block):
    """One site. `sources` has an entry for every fact: a page, or `unsourced: check`."""

    title: str
    runs_dir: str | None = None
    scratch: str = ""  # where shared scratch is, as a person would write it
    launch: dict[str, Any] = Field(default_factory=dict)
    channels: dict[str, Any] = Field(default_factory=dict)
    gpu_nodes: dict[str, Any] = Field(default_factory=dict)  # keys of a block of `resources`
    cpu_nodes: dict[str, Any] = Field(default_factory=dict)
    limits: SiteLimits = Field(default_factory=lambda: SiteLimits())
    sources: dict[str, str] = Field(default_factory=dict)

    def facts(self) -> Iterator[str]:
        """Dotted names of everything that the profile states about the site."""
        for name in ("runs_dir", "scratch"):
            if getattr(self, name):
                yield name
        for block in ("launch", "channels", "gpu_nodes", "cpu_nodes"):
            yield from _leaves(getattr(self, block), block)
        limits = self.limits.model_dump(exclude_none=True)
        yield from (f"limits.{name}" for name, value in limits.items() if value != [])

    def beneath(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a config (as written) with those of the profile where it has none."""
        merged = dict(values)
        if self.runs_dir is not None:
            merged.setdefault("runs_dir", self.runs_dir)
        merged["launch"] = _under(values.get("launch"), self._launch())
        merged["channels"] = _under(values.get("channels"), self.channels)
        resources = values.get("resources")
        if resources is None or isinstance(resources, Mapping):
            merged["resources"] = self._resources(resources or {})
        return merged

    def _launch(self) -> dict[str, Any]:
        """With what follows from the limits."""
        return ({"requeue": "resubmit"} if self.limits.requeue is False else {}) | self.launch

    def _resources(self, given: Mapping[str, Any]) -> dict[str, Any]:
        blocks, one_job = dict(given), given.get("job") is not None
        for role in (*_ROLES, *(["job"] if one_job else [])):
            below = self.gpu_nodes if _asks_for_gpus(given.get(role)) else self.cpu_nodes
            if one_job and role != "job":  # its nodes are the job's; only steps ask for GPUs
                below = {k: v for k, v in below.items() if k == "gpu_request"}
            blocks[role] = _under(given.get(role), below)
        return blocks


def site_names() -> list[str]:
    """The profiles that come with the product."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_site(site: str) -> SiteProfile:
    """The profile of that name or in that file. Raises ConfigError."""
    path = Path(site).expanduser()
    if path.suffix not in _ENDINGS:
        names = site_names()
        if site not in names:
            near = difflib.get_close_matches(site, names, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(names)}"
            raise ConfigError(
                f"launch.site: there is no site profile '{site}'; {hint} (or give the path of your "
                "own, ending in .yaml)"
            )
        path = FOLDER / f"{site}.yaml"
    return _checked(path, _read(path))


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"launch.site: cannot read the profile {path}: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"the site profile {path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"the site profile {path} holds no blocks of keys such as 'launch:'")
    return values


def _checked(path: Path, values: dict[str, Any]) -> SiteProfile:
    found = list(_mistakes(path, values))
    if found:
        raise ConfigError(".\n".join(found))
    profile = SiteProfile.model_validate(values)
    _check_config(path, profile)
    return profile


def _mistakes(path: Path, values: dict[str, Any]) -> Iterator[str]:
    """What the profile's own keys have wrong."""
    try:
        SiteProfile.model_validate(values)
    except ValidationError as error:
        for item in error.errors():
            name = ".".join(str(part) for part in item["loc"])
            if item["type"] != "extra_forbidden":
                yield f"{path}: {name}: {item['msg']}"
                continue
            block = SiteLimits if item["loc"][0] == "limits" else SiteProfile
            near = difflib.get_close_matches(str(item["loc"][-1]), block.model_fields, n=1)
            keys = ", ".join(block.model_fields)
            hint = f"did you mean '{near[0]}'?" if near else f"there are {keys}"
            yield f"{path}: unknown key '{name}'; {hint}"


def _check_config(path: Path, profile: SiteProfile) -> None:
    """Its values must be ones that a config may have."""
    values = {
        "launch": profile.launch,
        "channels": profile.channels,
        "resources": {"trainer": profile.gpu_nodes, "reward": profile.cpu_nodes},
    }
    try:
        Config.model_validate(values)
    except ValidationError as error:
        text = ".\n".join(sentences(error, values, lambda place: str(path)))
        for block, name in (("gpu_nodes", "trainer"), ("cpu_nodes", "reward")):
            text = text.replace(f"resources.{name}.", f"{block}.")
        raise ConfigError(text) from None


def _under(given: Any, below: Mapping[str, Any]) -> Any:
    """`given` with what only `below` has; what is no block stays for the schema to refuse."""
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        return given
    merged = dict(below) | dict(given)
    for key, value in below.items():
        if isinstance(value, Mapping) and isinstance(given.get(key), Mapping):
            merged[key] = _under(given[key], value)
    return merged


def _asks_for_gpus(block: Any) -> bool:
    return isinstance(block, Mapping) and bool(block.get("gpus_per_node"))


def _leaves(values: Mapping[str, Any], name: str) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{name}.{key}")
        else:
            yield f"{name}.{key}"
