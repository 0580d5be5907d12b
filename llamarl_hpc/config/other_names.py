"""Names of other tools, and of Slurm's own options, for what stands in `resources`.

A person who writes `trainer: {gpus: 4}` or `resources.reward.cores` means a key that exists; what
only sbatch knows belongs into `options`.
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
    return ""
