"""What a site is known to forbid, found before anything is submitted.

The values of a profile are in the config already (`config/site.py`); its limits are not values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llamarl_hpc.config.schema import Config, ResourceConfig
from llamarl_hpc.config.site import SiteProfile, load_site
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.launch.request import roles_of
from llamarl_hpc.slurm_text.time_limit import parse_time


def check_limits(config: Config) -> None:
    """Raise ConfigError when the config asks for what its site's profile rules out."""
    if config.launch.site is None:
        return
    site = load_site(config.launch.site)
    found = [*_shape(config, site), *_time(config, site)]
    if found:
        raise ConfigError(".\n".join(found))


def _shape(config: Config, site: SiteProfile) -> Iterator[str]:
    if site.limits.het_jobs is False and config.resources.job is None:
        yield (
            f"{site.title} does not allow heterogeneous jobs, and without resources.job a run is "
            "one; set resources.job to the nodes that all executors share"
        )
    if site.limits.requeue is False and config.launch.requeue == "requeue":
        yield (
            f"launch.requeue is requeue but {site.title} does not requeue jobs; leave it out, or "
            "set it to resubmit"
        )


def _time(config: Config, site: SiteProfile) -> Iterator[str]:
    """The limit holds for the partitions that the profile names, with the QoS that it names or
    none; others may allow more."""
    longest = parse_time(site.limits.max_time) if site.limits.max_time else None
    if longest is None:
        return
    for name, block in _blocks(config):
        wanted = parse_time(block.time) if block.time else None
        below: dict[str, Any] = site.gpu_nodes if block.gpus_per_node else site.cpu_nodes
        usual = all(getattr(block, key) == below.get(key) for key in ("partition", "qos"))
        if usual and wanted is not None and wanted > longest:
            yield (
                f"resources.{name}.time is {block.time} but {site.title} allows "
                f"{site.limits.max_time} on {block.partition or 'its default partition'}; shorten "
                "it (a run goes on in the next job)"
            )


def _blocks(config: Config) -> Iterator[tuple[str, ResourceConfig]]:
    if config.resources.job is not None:
        yield "job", config.resources.job
        return
    for role in roles_of(config):
        yield role, getattr(config.resources, role)
