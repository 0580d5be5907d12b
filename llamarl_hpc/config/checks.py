"""Rules between keys: what each key allows on its own, but not together. Changes nothing.

A rule is a function that yields sentences: which keys, with which values, and what to do. All of
them are reported at once, so that a user does not meet them one run at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from llamarl_hpc.config.algorithm_checks import algorithm_sentences
from llamarl_hpc.config.schema import Config, ResourceConfig
from llamarl_hpc.config.sync_checks import sync_sentences
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.slurm_text.gres import count_gpus
from llamarl_hpc.slurm_text.memory import parse_memory
from llamarl_hpc.slurm_text.option_names import check_option
from llamarl_hpc.slurm_text.time_limit import parse_time


def check(config: Config) -> None:
    """Raise ConfigError when keys contradict each other; one sentence per contradiction."""
    rules = [_data, _group, _lengths, algorithm_sentences, _steps, _rewards, _optimizer, _processes]
    rules += [_resources, _container, _lora, sync_sentences]
    sentences = [sentence for rule in rules for sentence in rule(config)]
    if sentences:
        raise ConfigError(".\n".join(sentences))


def _data(config: Config) -> Iterator[str]:
    data = config.data
    if data.path is None and not data.tasks:
        yield "there is no data: set data.path to a file or data.tasks to generated tasks"
    if "{prompt}" not in data.prompt_format:
        yield (
            f"data.prompt_format is {data.prompt_format!r} without '{{prompt}}', so every "
            "question would read the same; add '{prompt}'"
        )
    if data.prompt == []:
        yield "data.prompt is an empty list; name the column with the question"
    if data.system_prompt is not None and data.template == "plain":
        yield (
            "data.system_prompt has no place in data.template 'plain'; put it into "
            "data.prompt_format or use 'chat'"
        )


def _lora(config: Config) -> Iterator[str]:
    for name in config.model.lora.target_modules if config.model.lora is not None else []:
        if name in ("lm_head", "embed_tokens"):
            yield (
                f"model.lora.target_modules names {name}, which has no correction here; name "
                "layers of attention or of the feed-forward part, e.g. q_proj or down_proj"
            )


def _group(config: Config) -> Iterator[str]:
    group = config.rollout.num_generations
    # alone of all, it does not compare the completions of one prompt
    if group == 1 and config.algorithm.advantage != "reinforce_pp":
        yield (
            f"rollout.num_generations is 1 but algorithm.advantage "
            f"'{config.algorithm.advantage}' compares the completions of one prompt with each "
            "other; set rollout.num_generations to 2 or more, or the advantage to 'reinforce_pp'"
        )
    for key, number in (
        ("rollout.num_generations", group),
        ("evaluation.num_generations", config.evaluation.num_generations),
    ):
        if number > config.generator.max_concurrency:
            yield (
                f"{key} is {number} but generator.max_concurrency is "
                f"{config.generator.max_concurrency}, and a group is decoded at one time; raise "
                "generator.max_concurrency"
            )
    prompts, ranks = config.rollout.prompts_per_step, config.resources.trainer.num_ranks
    if prompts % ranks:
        yield (
            f"rollout.prompts_per_step is {prompts}, which {ranks} trainer ranks "
            "(resources.trainer.nodes x ntasks_per_node) cannot share evenly; set it to a "
            f"multiple of {ranks}"
        )


def _lengths(config: Config) -> Iterator[str]:
    rollout = config.rollout
    longest = rollout.max_prompt_length + rollout.max_completion_length
    if config.trainer.micro_batch_tokens < longest:
        yield (
            f"trainer.micro_batch_tokens is {config.trainer.micro_batch_tokens} but one row can "
            f"have {longest} tokens (rollout.max_prompt_length + max_completion_length); raise "
            f"it to {longest} or more"
        )
    if config.model.max_context is not None and longest > config.model.max_context:
        yield (
            f"rollout.max_prompt_length {rollout.max_prompt_length} plus "
            f"rollout.max_completion_length {rollout.max_completion_length} is {longest} tokens "
            f"but model.max_context is {config.model.max_context}; lower one of them"
        )


def _steps(config: Config) -> Iterator[str]:
    trainer, evaluation = config.trainer, config.evaluation
    if trainer.eval_steps > 0 and evaluation.num_prompts == 0:
        yield (
            f"trainer.eval_steps is {trainer.eval_steps} but evaluation.num_prompts is 0; set "
            "both or neither"
        )
    if trainer.save_best and evaluation.num_prompts == 0:
        yield (
            "trainer.save_best is true but evaluation.num_prompts is 0, so no checkpoint is better "
            "than another; set evaluation.num_prompts or leave save_best out"
        )
    elif trainer.save_best and trainer.eval_steps == 0:
        yield (
            "trainer.save_best is true but trainer.eval_steps is 0, so only the last checkpoint is "
            "measured; set trainer.eval_steps or leave save_best out"
        )
    if trainer.warmup_steps > trainer.max_steps:
        yield (
            f"trainer.warmup_steps is {trainer.warmup_steps} but the run has only "
            f"{trainer.max_steps} steps (trainer.max_steps); lower trainer.warmup_steps"
        )


def _rewards(config: Config) -> Iterator[str]:
    names = [
        reward.name or (reward.function.rpartition(":")[2] if reward.kind == "python" else "")
        for reward in config.rewards
    ]
    for name, number in Counter(names).items():
        if number > 1:
            yield f"{number} rewards are called '{name}'; give each its own name (rewards.N.name)"
        if not name.strip(".") or "/" in name or len(name.split()) != 1:
            yield (
                f"'{name}' cannot name a reward; wanted a word without '/' and blanks in "
                "rewards.N.name"
            )
    if all(reward.weight == 0.0 for reward in config.rewards):
        yield "every rewards.N.weight is 0, so nothing can be learnt; set one to another value"


def _optimizer(config: Config) -> Iterator[str]:
    for key in ("adam_beta1", "adam_beta2"):
        value = getattr(config.trainer, key)
        if value >= 1.0:
            yield f"trainer.{key} is {value}, an average that never moves; set it below 1"
    trainer = config.trainer
    if trainer.offload_optimizer and trainer.zero_stage == 0:
        yield (
            "trainer.offload_optimizer is true but trainer.zero_stage is 0, which keeps the "
            "optimizer beside the parameters; set trainer.zero_stage to 1 or more"
        )
    if trainer.offload_parameters and trainer.zero_stage != 3:
        yield (
            f"trainer.offload_parameters is true but trainer.zero_stage is {trainer.zero_stage}, "
            "which keeps whole parameters on every rank; set trainer.zero_stage to 3"
        )


def _processes(config: Config) -> Iterator[str]:
    channels, resources = config.channels, config.resources
    if channels.heartbeat_timeout_s <= channels.heartbeat_s:
        yield (
            f"channels.heartbeat_timeout_s {channels.heartbeat_timeout_s:g} is not above "
            f"channels.heartbeat_s {channels.heartbeat_s:g}, so every executor would be taken "
            "for dead; raise it to several heartbeats"
        )
    if resources.reward.num_ranks > 1:
        yield (
            f"resources.reward asks for {resources.reward.num_ranks} ranks, but it works on one; "
            "set nodes and ntasks_per_node to 1 and raise reward_pool.workers instead"
        )


def _resources(config: Config) -> Iterator[str]:
    resources = config.resources
    blocks = {"trainer": resources.trainer, "generator": resources.generator}
    blocks |= {"reward": resources.reward, "reference": resources.reference}
    if resources.job is not None:
        blocks["job"] = resources.job
    for name, block in blocks.items():
        yield from (f"resources.{name}.{sentence}" for sentence in _block(block))
        if name != "job" and 0 < block.gpus_per_node < block.ntasks_per_node:
            yield (
                f"resources.{name} has {block.gpus_per_node} GPUs for the {block.ntasks_per_node} "
                "ranks of a node, but NCCL wants one for each; make gpus_per_node at least "
                "ntasks_per_node"
            )
    if config.generator.replicas_per_node > 1 and resources.generator.nodes > 1:
        yield (
            f"generator.replicas_per_node is {config.generator.replicas_per_node} but a replica "
            f"has {resources.generator.nodes} nodes (resources.generator.nodes); set one of them "
            "to 1"
        )


def _container(config: Config) -> Iterator[str]:
    container = config.launch.container
    words = [*container.command, *container.srun_args]
    if container.image is not None and not any("{image}" in word for word in words):
        yield (
            f"launch.container.image is {container.image} but neither launch.container.command "
            "nor launch.container.srun_args has '{image}', so it would not be used; add it to one"
        )


def _block(block: ResourceConfig) -> Iterator[str]:
    """What is wrong within one block of resources; every sentence begins with a key."""
    amounts = {"mem": block.mem, "mem_per_cpu": block.mem_per_cpu, "mem_per_gpu": block.mem_per_gpu}
    given = {key: amount for key, amount in amounts.items() if amount is not None}
    if len(given) > 1:
        yield f"{' and '.join(given)} exclude one another; keep one of them"
    for key, amount in given.items():
        yield from _refused(key, parse_memory, amount)
    if block.time is not None:
        yield from _refused("time", parse_time, block.time)
    if not block.gpus_per_node:
        for key in ("gpu_type", "mem_per_gpu"):
            if getattr(block, key) is not None:
                yield f"{key} is set but gpus_per_node is 0; set gpus_per_node too"
    elif block.gpu_request == "gpus_per_task" and block.gpus_per_node % block.ntasks_per_node:
        yield (
            f"gpus_per_node is {block.gpus_per_node}, which {block.ntasks_per_node} tasks "
            "(ntasks_per_node) cannot share evenly as gpu_request gpus_per_task wants; set it to "
            "a multiple"
        )
    for name, value in block.options.items():
        yield from _option(name, value)


def _option(name: str, value: str) -> Iterator[str]:
    yield from _refused(f"options.{name}", check_option, name)
    key = name.strip().removeprefix("--").replace("-", "_")
    if key in ResourceConfig.model_fields:
        yield f"options.{name} is a key of its own; write {key} without 'options'"
    elif key in _OURS:
        yield f"options.{name} is set by the run itself; remove it"
    elif key in _OTHER_GPU_OPTIONS or (key == "gres" and _has_gpus(value)):
        yield (
            f"options.{name} asks for GPUs of which the run would not know; write gpus_per_node, "
            "with gpu_type and gpu_request as the site wants them"
        )


def _has_gpus(gres: str) -> bool:
    try:
        return count_gpus(gres, nodes=1) > 0
    except ConfigError:
        return True


# options of sbatch that a component cannot have, or that the launcher writes
_OURS = {
    "output",
    "error",
    "open_mode",
    "job_name",
    "signal",
    "array",
    "ntasks",
    "parsable",
    "wait",
}
_OURS |= {"requeue", "no_requeue", "input", "chdir"}
_OTHER_GPU_OPTIONS = {"gpus", "gpus_per_task", "gpus_per_socket", "tres_per_task"}


def _refused(key: str, parse: Callable[[str], object], text: str) -> Iterator[str]:
    try:
        parse(text)
    except ConfigError as error:
        yield f"{key}: {error}"
