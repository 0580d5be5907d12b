"""What weight sync costs on this machine, against a memory copy and against what others do.

Trainer ranks and generator replicas are processes of one `mpiexec`; weights are made up. In every
round each way of moving one version takes its turn, and the medians of the rounds count:

    copy               every trainer rank copies its part within its own memory
    shared_memory      until every replica may read the version in place
    collective         until every replica has received it (gloo)
    raw_broadcast      one broadcast by each trainer rank over the same groups, nothing else
    gather_broadcast   parameter by parameter: gather on trainer rank 0, which broadcasts it
    disk               gather on trainer rank 0, which saves a file that every replica loads

`_verified` is the same with `weight_sync.verify: full`. Ratios are taken round by round, so that
a machine that others use at the time hurts both sides.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.launch.steps import MpiExec
from llamarl_hpc.placement import MARKER
from llamarl_hpc.weight_sync.bench_task import Answer, Task, model_specs

WAYS = [
    "copy",
    "shared_memory",
    "shared_memory_verified",
    "collective",
    "collective_verified",
    "raw_broadcast",
    "gather_broadcast",
    "disk",
]
_COPIES = 11  # of the model that all processes together hold
_ITEM_BYTES = {"fp32": 4, "bf16": 2}


def measure(task: Task) -> dict[str, Any]:
    """All figures, ready for JSON. Raises ConfigError when the machine is too small."""
    specs = model_specs(task.size, task.dtype, task.parameters)
    num_bytes = sum(spec.numel for spec in specs) * _ITEM_BYTES[task.dtype]
    _check_memory(num_bytes)
    with tempfile.TemporaryDirectory(prefix="bench-weight-sync-") as folder:
        answer = _run(msgspec.structs.replace(task, folder=folder))
    return figures(task, answer)


def figures(task: Task, answer: Answer) -> dict[str, Any]:
    """Medians over the rounds; ratios are 'times faster' (or shares), higher is better."""
    rounds = answer.rounds

    def ratio(base: str, way: str) -> float:
        return statistics.median(r.seconds[base] / r.seconds[way] for r in rounds)

    seconds = {way: statistics.median(r.seconds[way] for r in rounds) for way in WAYS}
    gigabytes = answer.num_bytes / 1e9
    result: dict[str, Any] = {
        "size": task.size,
        "dtype": task.dtype,
        "trainers": task.trainers,
        "generators": task.generators,
        "zero_stage": task.zero_stage,
        "gigabytes": gigabytes,
        "shared_memory_vs_copy": ratio("copy", "shared_memory"),
        "shared_memory_verified_vs_copy": ratio("copy", "shared_memory_verified"),
        "collective_vs_gather_broadcast": ratio("gather_broadcast", "collective"),
        "collective_vs_disk": ratio("disk", "collective"),
        "collective_vs_raw_broadcast": ratio("raw_broadcast", "collective"),
        "collective_verified_vs_raw_broadcast": ratio("raw_broadcast", "collective_verified"),
    }
    for way in WAYS[1:5]:
        stalls = [r.stall[way] / r.seconds["copy"] for r in rounds]
        result[f"stall_vs_copy_{way}"] = statistics.median(stalls)
    for number in rounds[0].by_replicas:
        times = [r.by_replicas[number] / r.by_replicas["1"] for r in rounds]
        result[f"shared_memory_s_{number}_replicas_vs_1"] = statistics.median(times)
    for way, value in seconds.items():
        result[f"{way}_s"] = value
        result[f"{way}_gb_per_s_per_receiver"] = gigabytes / value
    for way in WAYS[1:5]:
        result[f"{way}_trainer_stall_s"] = statistics.median(r.stall[way] for r in rounds)
    for way in ("shared_memory", "collective"):
        result[f"{way}_generator_pause_s"] = statistics.median(r.pause[way] for r in rounds)
    return result | {
        "collective_trainer_memory_mib": answer.trainer_memory / 2**20,
        "collective_generator_memory_mib": answer.generator_memory / 2**20,
        "shared_memory_file_mib": answer.shared_bytes / 2**20,
        "load_1min": os.getloadavg()[0],
        "cores": len(os.sched_getaffinity(0)),
    }


def _check_memory(num_bytes: int) -> None:
    import psutil

    free = psutil.virtual_memory().available
    if free < _COPIES * num_bytes:
        raise ConfigError(
            f"measuring {num_bytes >> 20:,} MiB of weights takes about "
            f"{_COPIES * num_bytes >> 20:,} MiB of memory but {free >> 20:,} MiB are free; "
            "take a smaller --size or --dtype bf16"
        )


def _run(task: Task) -> Answer:
    """Start the ranks and wait for what their first one writes."""
    as_root = os.geteuid() == 0
    mpiexec = MpiExec.find().argv(task.trainers + task.generators, as_root=as_root)
    program = [sys.executable, "-m", "llamarl_hpc.weight_sync.bench_rank"]
    environment = os.environ | {
        MARKER: "bench",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [*mpiexec, *program, json.dumps(msgspec.to_builtins(task))],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    answer = Path(task.folder) / "answer.json"
    if done.returncode != 0 or not answer.exists():
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(
            f"a process of the benchmark ended with code {done.returncode} ({last}); try a "
            "smaller --size or fewer processes"
        )
    return msgspec.json.decode(answer.read_bytes(), type=Answer)
