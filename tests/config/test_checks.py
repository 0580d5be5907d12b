"""Rules between keys: each contradiction is named with its values and the way out."""

from __future__ import annotations

from typing import Any

import pytest

from llamarl_hpc.config.checks import check
from llamarl_hpc.config.losses import PRESETS
from llamarl_hpc.config.model_checks import check_model, check_replica
from llamarl_hpc.config.schema import AlgorithmConfig, Config
from llamarl_hpc.errors import ConfigError

TASKS = {"tasks": [{"name": "chain_sum"}]}


def make(**blocks: Any) -> Config:
    return Config.model_validate({"data": TASKS, **blocks})


def refusal(**blocks: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check(make(**blocks))
    return str(caught.value)


def test_the_defaults_with_data_are_consistent() -> None:
    check(make())


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ({"data": {}}, "there is no data: set data.path"),
        ({"data": TASKS | {"prompt_format": "x"}}, "data.prompt_format is 'x' without"),
        ({"data": TASKS | {"prompt": []}}, "data.prompt is an empty list"),
        (
            {"data": TASKS | {"template": "plain", "system_prompt": "be brief"}},
            "data.system_prompt has no place in data.template 'plain'",
        ),
        (
            {"resources": {"generator": {"gpus_per_node": 1, "ntasks_per_node": 2}}},
            "resources.generator has 1 GPUs for the 2 ranks of a node",
        ),
        (
            {"rollout": {"num_generations": 1}},
            "rollout.num_generations is 1 but algorithm.advantage 'group_mean'",
        ),
        (
            {"rollout": {"num_generations": 1}, "algorithm": {"advantage": "rloo"}},
            "algorithm.advantage 'rloo'",
        ),
        (
            {"rollout": {"num_generations": 16}, "generator": {"max_concurrency": 8}},
            "rollout.num_generations is 16 but generator.max_concurrency is 8",
        ),
        (
            {"evaluation": {"num_generations": 16}, "generator": {"max_concurrency": 8}},
            "evaluation.num_generations is 16 but generator.max_concurrency is 8",
        ),
        (
            {
                "rollout": {"prompts_per_step": 6},
                "resources": {"trainer": {"nodes": 2, "ntasks_per_node": 2}},
            },
            "rollout.prompts_per_step is 6, which 4 trainer ranks",
        ),
        (
            {"trainer": {"micro_batch_tokens": 383}},
            "trainer.micro_batch_tokens is 383 but one row can have 384 tokens",
        ),
        (
            {"trainer": {"offload_optimizer": True, "zero_stage": 0}},
            "trainer.offload_optimizer is true but trainer.zero_stage is 0",
        ),
        (
            {"trainer": {"offload_parameters": True, "zero_stage": 2}},
            "trainer.offload_parameters is true but trainer.zero_stage is 2",
        ),
        (
            {"trainer": {"save_best": True}, "evaluation": {"num_prompts": 0}},
            "trainer.save_best is true but evaluation.num_prompts is 0",
        ),
        ({"trainer": {"save_best": True}}, "trainer.save_best is true but trainer.eval_steps is 0"),
        (
            {"model": {"lora": {"target_modules": ["lm_head"]}}},
            "model.lora.target_modules names lm_head",
        ),
        ({"model": {"max_context": 383}}, "is 384 tokens but model.max_context is 383"),
        ({"algorithm": {"overlong_buffer": 129}}, "algorithm.overlong_buffer is 129"),
        ({"algorithm": {"overlong_penalty": 2.0}}, "algorithm.overlong_buffer is 0, so nothing"),
        ({"algorithm": {"rho": 0.5}}, "algorithm.rho is 0.5"),
        ({"algorithm": {"loss_type": "ppo", "rho": 2.0}}, "rho means nothing to algorithm.loss"),
        ({"algorithm": {"mismatch_max": 2.0}}, "algorithm.mismatch_max is 2.0 but algorithm.mism"),
        ({"algorithm": {"mismatch_level": "sequence"}}, "algorithm.mismatch_correction is 'none'"),
        *(
            (
                {"algorithm": {"loss_type": kind, "mismatch_correction": "truncate", key: value}},
                f"algorithm.{key} means nothing beside algorithm.mismatch_correction 'truncate'",
            )
            for kind, key, value in (
                ("reinforce", "mismatch_min", 0.8),
                ("ppo", "epsilon", 0.1),
                ("gspo", "epsilon_high", 0.1),
                ("dapo", "delta", 3.0),
            )
        ),
        ({"algorithm": {"loss_type": "ppo", "epsilon": 1.0}}, "algorithm.epsilon is 1.0"),
        ({"algorithm": {"loss_type": "cispo", "epsilon": 1.1}}, "or to 1 for no lower clip"),
        ({"algorithm": {"epsilon_high": 0.3}}, "epsilon_high means nothing to algorithm.loss_type"),
        ({"algorithm": {"loss_type": "cispo", "delta": 3.0}}, "algorithm.delta means nothing"),
        ({"algorithm": {"loss_type": "dapo", "delta": 1.28}}, "ratios up to 1.28"),
        (
            {"algorithm": {"loss_type": "reinforce", "importance_sampling_level": "token"}},
            "importance_sampling_level means nothing to algorithm.loss_type 'reinforce'",
        ),
        (
            {"algorithm": {"mismatch_correction": "truncate"}},
            "truncates the same ratio itself; set algorithm.rho",
        ),
        (
            {"algorithm": {"loss_type": "cispo", "mismatch_correction": "truncate"}},
            "truncates the same ratio itself; set algorithm.epsilon_high",
        ),
        (
            {
                "algorithm": {
                    "loss_type": "grpo",
                    "mismatch_correction": "truncate",
                    "mismatch_max": 0.9,
                }
            },
            "algorithm.mismatch_max is 0.9, which would shrink",
        ),
        (
            {"algorithm": {"mismatch_correction": "mask", "mismatch_min": 1.5}},
            "algorithm.mismatch_min 1.5 to mismatch_max 5 leaves out on-policy tokens",
        ),
        (
            {"algorithm": {"loss_type": "decoupled_ppo", "mismatch_correction": "truncate"}},
            "truncates the same ratio itself; set algorithm.rho",
        ),
        ({"algorithm": {"loss_type": "decoupled_ppo", "rho": 0.9}}, "algorithm.rho is 0.9"),
        (
            {"algorithm": {"beta": 0.1, "kl_estimator": "k1"}},
            "'k1' in the loss has a gradient that is 0 on average",
        ),
        (
            {"reference": {"micro_batch_tokens": 383}},
            "reference.micro_batch_tokens is 383 but one row can have 384 tokens",
        ),
        (
            {"algorithm": {"dynamic_sampling": True, "advantage": "reinforce_pp"}},
            "algorithm.advantage 'reinforce_pp' does not compare within groups",
        ),
        (
            {"algorithm": {"max_resamples": 4}},
            "algorithm.max_resamples is 4 but algorithm.dynamic_sampling is false",
        ),
        (
            {"algorithm": {"dynamic_sampling": True, "max_resamples": 0}},
            "algorithm.max_resamples is 0, so no group is replaced",
        ),
        (
            {"algorithm": {"in_flight_weight_updates": True, "max_staleness": 0}},
            "algorithm.max_staleness 0 forbids completions of mixed versions",
        ),
        (
            {"trainer": {"eval_steps": 10}, "evaluation": {"num_prompts": 0}},
            "trainer.eval_steps is 10 but evaluation.num_prompts is 0",
        ),
        (
            {"trainer": {"max_steps": 5, "warmup_steps": 6}},
            "trainer.warmup_steps is 6 but the run has only 5 steps",
        ),
        ({"trainer": {"adam_beta2": 1.0}}, "trainer.adam_beta2 is 1.0"),
        (
            {"rewards": [{"kind": "python", "function": f} for f in ("a:f", "b:f")]},
            "2 rewards are called 'f'",
        ),
        ({"rewards": [{"kind": "math_answer", "name": "a/b"}]}, "'a/b' cannot name a reward"),
        ({"rewards": [{"kind": "math_answer", "name": "a b"}]}, "'a b' cannot name a reward"),
        ({"rewards": [{"kind": "math_answer", "name": ".."}]}, "'..' cannot name a reward"),
        ({"rewards": [{"kind": "math_answer", "weight": 0.0}]}, "every rewards.N.weight is 0"),
        (
            {"channels": {"heartbeat_s": 60.0}},
            "channels.heartbeat_timeout_s 60 is not above channels.heartbeat_s 60",
        ),
        (
            {
                "weight_sync": {"transport": "shared_memory"},
                "resources": {"trainer": {"nodes": 2}},
            },
            "'shared_memory' works on one node but an executor has 2",
        ),
        (
            {
                "weight_sync": {"replica_memory": "window"},
                "resources": {
                    "trainer": {"gpus_per_node": 2},
                    "generator": {"gpus_per_node": 2, "ntasks_per_node": 2},
                },
            },
            "weight_sync.replica_memory 'window' is memory of the CPU",
        ),
        (
            {
                "weight_sync": {"replica_memory": "parts", "delta": "auto"},
                "resources": {"generator": {"ntasks_per_node": 2}},
            },
            "weight_sync.delta 'auto' needs a receiver that holds the whole version before",
        ),
        (
            {"resources": {"reward": {"nodes": 3}}},
            "resources.reward asks for 3 ranks, but it works on one",
        ),
    ],
)
def test_a_contradiction_is_one_sentence(blocks: dict[str, Any], said: str) -> None:
    message = refusal(**blocks)
    assert said in message
    assert len(message.splitlines()) == 1


def test_all_contradictions_are_told_at_once() -> None:
    message = refusal(data={}, rollout={"num_generations": 1}, algorithm={"rho": 0.5})
    assert len(message.splitlines()) == 3


@pytest.mark.parametrize(
    "blocks",
    [
        {"trainer": {"micro_batch_tokens": 384}},
        {"model": {"max_context": 384}},
        {"algorithm": {"rho": 1.0}},
        *({"algorithm": {"loss_type": kind}} for kind in PRESETS),
        # as in the copy in a run folder, where every key has a value
        *({"algorithm": AlgorithmConfig(loss_type=kind).model_dump()} for kind in PRESETS),
        {"algorithm": {"kl_in": "reward", "kl_estimator": "k1"}, "reference": {"update_steps": 2}},
        {"algorithm": {"advantage": "reinforce_pp"}, "rollout": {"num_generations": 1}},
        {"algorithm": {"overlong_buffer": 128}},
        {"algorithm": {"loss_type": "cispo", "epsilon": 1.0}},
        {"algorithm": {"loss_type": "dapo", "delta": 3.0}},
        {"algorithm": {"loss_type": "dapo", "mismatch_correction": "truncate"}},
        {"algorithm": {"mismatch_correction": "mask", "mismatch_min": 0.0}},
        {"trainer": {"max_steps": 5, "warmup_steps": 5}},
        {"evaluation": {"num_prompts": 0}},
        {"rollout": {"num_generations": 64}},
        {"rollout": {"prompts_per_step": 4}, "resources": {"trainer": {"ntasks_per_node": 4}}},
    ],
)
def test_values_at_the_limit_are_allowed(blocks: dict[str, Any]) -> None:
    check(make(**blocks))


def test_prompt_and_completion_must_fit_the_models_context() -> None:
    check_model(make(), 384)
    with pytest.raises(ConfigError, match=r"256 plus .* 128 is 384 tokens but the context is 383"):
        check_model(make(), 383)


def test_every_rank_of_a_replica_needs_a_part_of_the_model() -> None:
    smollm2 = {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
    three = make(resources={"generator": {"ntasks_per_node": 3}})
    check_replica(three, smollm2)
    check_replica(three, {"num_attention_heads": 4})  # of one kind of heads
    six = make(resources={"generator": {"ntasks_per_node": 3, "nodes": 2}})
    said = (
        r"asks for 6 ranks \(.*\) but the model has 3 heads of keys and values .* lower them to 3"
    )
    with pytest.raises(ConfigError, match=said):
        check_replica(six, smollm2)


def test_max_context_lowers_the_limit_but_never_raises_it() -> None:
    check_model(make(model={"max_context": 400}), 2048)
    with pytest.raises(ConfigError, match="384 tokens but the context is 300"):
        check_model(make(model={"max_context": 300}), 2048)
    with pytest.raises(ConfigError, match="was made for 2048 tokens"):
        check_model(make(model={"max_context": 4096}), 2048)
