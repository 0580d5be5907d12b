"""Names of other tools, and of Slurm's own options, for keys that exist here under another name.

A person who writes `trainer: {gpus: 4}` or `algorithm.kl_coef` means a key that exists; what only
sbatch knows belongs into `resources.*.options`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from llamarl_hpc.config import fields
from llamarl_hpc.slurm_text.option_names import is_option

_ROLES = ("trainer", "generator", "reward", "reference")
_KEYS = {
    "gpus_per_node": "gpu gpus gres gpus_per_task gpus_per_replica",
    "gpu_type": "gpu_model gpu_name",
    "cpus_per_task": "cpu cpus core cores threads cores_per_task threads_per_task",
    "ntasks_per_node": "tasks ntasks ranks processes procs ranks_per_node processes_per_node "
    "tensor_parallel tensor_parallel_size tensor_model_parallel_size tp tp_size",
    "partition": "queue",
    "account": "project allocation",
    "constraint": "feature features",
    "mem": "memory ram",
    "time": "walltime wall_time time_limit timeout",
}
_KEY_OF = {name: key for key, names in _KEYS.items() for name in names.split()}
# of the loss and the step, as TRL, verl, OpenRLHF and others call them; in whichever block
TRAINING_KEYS = {
    "algorithm.beta": "kl_coef kl_loss_coef kl_coeff kl_beta kl_weight init_kl_coef",
    "algorithm.epsilon": "clip_eps clip_epsilon clip_ratio clip_range cliprange eps_clip "
    "epsilon_low clip_ratio_low eps_clip_low",
    "algorithm.epsilon_high": "clip_ratio_high clip_eps_high eps_clip_high clip_range_high",
    "algorithm.delta": "clip_ratio_c dual_clip",
    "algorithm.entropy_coef": "entropy_coeff entropy_bonus entropy_weight ent_coef",
    "algorithm.loss_aggregation": "loss_agg_mode",
    "algorithm.advantage": "adv_estimator advantage_estimator scale_rewards",
    "algorithm.mismatch_max": "tis_imp_ratio_cap tis_cap vllm_importance_sampling_cap",
    "algorithm.truncated_completions": "mask_truncated_completions overlong_filtering",
    "trainer.learning_rate": "lr",
    "trainer.max_grad_norm": "grad_clip clip_grad gradient_clipping max_norm",
    "trainer.micro_batch_tokens": "gradient_accumulation_steps per_device_train_batch_size "
    "micro_batch_size ppo_micro_batch_size max_token_len_per_gpu",
    "trainer.max_steps": "num_steps total_steps total_training_steps",
    "trainer.zero_stage": "deepspeed zero stage",
    "trainer.dtype": "bf16 fp16 precision",
    "rollout.num_generations": "n group_size num_samples rollouts_per_prompt n_samples_per_prompt",
    "rollout.prompts_per_step": "batch_size train_batch_size rollout_batch_size global_batch_size",
    "rollout.max_completion_length": "max_new_tokens max_tokens max_response_length",
    "reference.update_steps": "ref_model_sync_steps sync_ref_model",
}
_TRAINING_KEY_OF = {n: key for key, names in TRAINING_KEYS.items() for n in names.split()}
_COUNTED = re.compile(r"^(num|number_of|n)_|(_gb|_mb|_min|_s|_hours)$")


def hint_for(place: Sequence[str | int]) -> str:
    """What to write instead of an unknown key; empty when this file does not know it either."""
    parts = [str(part) for part in place]
    leaf = _COUNTED.sub("", parts[-1].replace("-", "_"))
    block = parts[:-1]
    if block[:1] == ["resources"] and fields.find([*block, "options"]) is not None:
        key = _KEY_OF.get(leaf, leaf)
        if fields.find([*block, key]) is not None:
            return f"did you mean '{'.'.join([*block, key])}'?"
        if is_option(leaf):
            name = leaf.replace("_", "-")
            return f"options of sbatch go into '{'.'.join(block)}.options.{name}'"
    elif block == ["resources"] or (len(block) == 1 and block[0] in _ROLES):
        role = block[0] if block[0] in _ROLES else _ROLES[0]
        key = _KEY_OF.get(leaf, leaf)
        if fields.find(["resources", role, key]) is not None:
            return f"did you mean 'resources.{role}.{key}'?"
    if not block or block in (["algorithm"], ["trainer"], ["rollout"], ["reference"]):
        key = _TRAINING_KEY_OF.get(parts[-1].replace("-", "_"), "")
        return f"did you mean '{key}'?" if key else ""
    return ""
