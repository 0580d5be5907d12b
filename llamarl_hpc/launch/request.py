"""What a run asks Slurm for: from the config's `resources` to the options of each component.

The components of a heterogeneous job are, in this order, trainer, generators, reward, and the
reference if it is an executor of its own; job steps are started with `--het-group` by the same
order (`component_of`). Pure.
"""

from __future__ import annotations

from llamarl_hpc.config.schema import Config, ResourceConfig
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.launch.script import Component
from llamarl_hpc.placement import executor_names, role_of
from llamarl_hpc.slurm_text.memory import format_memory, parse_memory
from llamarl_hpc.slurm_text.option_names import check_option
from llamarl_hpc.slurm_text.time_limit import format_time, parse_time

_ROLES = ("trainer", "generator", "reward", "reference")


def roles_of(config: Config) -> list[str]:
    """Roles of a run, one component each."""
    present = {role_of(executor) for executor in executor_names(config)}
    return [role for role in _ROLES if role in present]


def component_of(executor: str) -> int:
    """Number of the component whose nodes an executor runs on."""
    return _ROLES.index(role_of(executor))


def components_of(config: Config) -> list[Component]:
    """One component per role; one in all if `resources.job` is set. Raises ConfigError when the
    blocks do not make one job."""
    if config.resources.job is not None:
        return [Component(name="all executors", options=_options(config.resources.job))]
    blocks = {role: component_block(config, role) for role in roles_of(config)}
    _check_time(blocks)
    _check_memory(blocks)
    limit = next((block.time for block in blocks.values() if block.time), None)
    return [
        Component(
            name=_title(config, role), options=_options(block.model_copy(update={"time": limit}))
        )
        for role, block in blocks.items()
    ]


def gpu_option(block: ResourceConfig, *, form: str = "") -> dict[str, str]:
    """`{"gpus-per-node": "a100:4"}`, or as `gpu_request` or `form` says; empty without GPUs."""
    if not block.gpus_per_node:
        return {}
    form = form or block.gpu_request
    number = block.gpus_per_node
    if form == "gpus_per_task":
        number //= block.ntasks_per_node
    kind = f"{block.gpu_type}:" if block.gpu_type else ""
    if form == "gres":
        return {"gres": f"gpu:{kind}{number}"}
    return {form.replace("_", "-"): f"{kind}{number}"}


def component_block(config: Config, role: str) -> ResourceConfig:
    """The resources of all executors of a role together: its component."""
    block: ResourceConfig = getattr(config.resources, role)
    if role != "generator":
        return block
    replicas, beside = config.generator.replicas, config.generator.replicas_per_node
    beside = min(beside, replicas)
    return block.model_copy(
        update={
            "nodes": block.nodes * -(-replicas // beside),
            "ntasks_per_node": block.ntasks_per_node * beside,
            "gpus_per_node": block.gpus_per_node * beside,
            "mem": _times(block.mem, beside),
        }
    )


def _times(amount: str | None, factor: int) -> str | None:
    memory = parse_memory(amount) if amount is not None else None
    if memory is None or factor == 1:
        return amount
    return format_memory(type(memory)(mib=memory.mib * factor))


def _title(config: Config, role: str) -> str:
    if role != "generator":
        return role
    number = config.generator.replicas
    return f"generator ({number} replica{'s' if number > 1 else ''})"


def _options(block: ResourceConfig) -> dict[str, str | int | None]:
    """sbatch's long options; every sizing option is written, because components inherit few."""
    options: dict[str, str | int | None] = {
        name: value
        for name in ("partition", "account", "qos", "constraint")
        if (value := getattr(block, name))
    }
    options |= {
        "nodes": block.nodes,
        "ntasks-per-node": block.ntasks_per_node,
        "cpus-per-task": block.cpus_per_task,
        **gpu_option(block),
    }
    for key in ("mem", "mem_per_cpu", "mem_per_gpu"):
        if (amount := getattr(block, key)) is not None:
            memory = parse_memory(amount)
            assert memory is not None, amount
            options[key.replace("_", "-")] = format_memory(memory)
    seconds = parse_time(block.time) if block.time else None
    if seconds is not None:
        options["time"] = format_time(seconds)
    for name, text in block.options.items():
        option = check_option(name)
        if option == "gres" and option in options:  # `nvme:1` beside the GPUs
            text = f"{options[option]},{text}"
        options[option] = text or None
    return options


def _check_time(blocks: dict[str, ResourceConfig]) -> None:
    given = {role: block.time for role, block in blocks.items() if block.time}
    if len({parse_time(text) for text in given.values()}) > 1:
        shown = ", ".join(f"resources.{role}.time {text}" for role, text in given.items())
        raise ConfigError(f"the parts of a run end together, but there are {shown}; write one time")


def _check_memory(blocks: dict[str, ResourceConfig]) -> None:
    """Slurm gives a component without a memory option its partition's default, which may be small,
    whatever the others say; so it is all or none."""
    without = [r for r, b in blocks.items() if not (b.mem or b.mem_per_cpu or b.mem_per_gpu)]
    if without and len(without) < len(blocks):
        keys = ", ".join(f"resources.{role}" for role in without)
        raise ConfigError(
            f"{keys} name no memory although other executors do, and would get a default of the "
            "partition; set mem, mem_per_cpu or mem_per_gpu there too"
        )
