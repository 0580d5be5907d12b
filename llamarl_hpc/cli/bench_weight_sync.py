"""What weight sync costs on this machine, against a memory copy and against what others do.

Trainer ranks and generator replicas are processes of one `mpiexec`; weights are made up. In every
round each way of moving one version takes its turn, and the medians of the rounds count:

    copy               every trainer rank copies its part within its own memory
    shared_memory      until every replica may read the version in place
    collective         until every replica has received it (gloo)
    collective_delta   the same with `weight_sync.delta: auto` where one element in 200 has changed
    raw_broadcast      one broadcast by each trainer rank over the same groups, nothing else
    gather_broadcast   parameter by parameter: gather on trainer rank 0, which broadcasts it
    disk               gather on trainer rank 0, which saves a file that every replica loads

`_verified` is the same with `weight_sync.verify: full`. For `in_flight_pause` each replica reads
all its weights again and again, as decoding does, while a version arrives: the time between the two
such steps that the switch lies between, and what of it is no plain copy, in steps. With
`--ranks-per-replica`, `collective` is also measured to replicas of so many ranks, which share a
window. `--quantization int8` adds `shared_memory_int8` and `collective_int8`: the same version,
which the trainer quantises while it copies it. Ratios are taken round by round, so that a machine
that others use at the time hurts both sides.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.launch.children import run_ranks
from llamarl_hpc.placement import MARKER
from llamarl_hpc.weight_sync.bench.task import Answer, Task, model_specs
from llamarl_hpc.weight_sync.shared_memory.segment import remove_stale

_ITEM_BYTES = {"fp32": 4, "bf16": 2}


def measure(task: Task) -> dict[str, Any]:
    """All figures, ready for JSON. Raises ConfigError when the machine is too small."""
    specs = model_specs(task.size, task.dtype, task.parameters)
    num_bytes = sum(spec.numel for spec in specs) * _ITEM_BYTES[task.dtype]
    _check_memory(num_bytes * _copies(task))
    with tempfile.TemporaryDirectory(prefix="bench-weight-sync-") as folder:
        answer = _run(msgspec.structs.replace(task, folder=folder))
    return figures(task, answer)


def figures(task: Task, answer: Answer) -> dict[str, Any]:
    """Medians over the rounds; ratios are 'times faster' (or shares), higher is better."""
    rounds = answer.rounds

    def ratio(base: str, way: str) -> float:
        return statistics.median(r.seconds[base] / r.seconds[way] for r in rounds)

    seconds = {way: statistics.median(r.seconds[way] for r in rounds) for way in rounds[0].seconds}
    stalls = {way: statistics.median(r.stall[way] for r in rounds) for way in rounds[0].stall}
    gigabytes = answer.num_bytes / 1e9
    int8_gigabytes = answer.int8_bytes / 1e9
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
        "collective_delta_vs_collective": ratio("collective", "collective_delta"),
        "collective_delta_vs_disk": ratio("disk", "collective_delta"),
        "collective_vs_raw_broadcast": ratio("raw_broadcast", "collective"),
        "collective_verified_vs_raw_broadcast": ratio("raw_broadcast", "collective_verified"),
    }
    for way in stalls:
        in_copies = [r.stall[way] / r.seconds["copy"] for r in rounds]
        result[f"stall_vs_copy_{way}"] = statistics.median(in_copies)
    if answer.int8_bytes:
        result["int8_gigabytes"] = int8_gigabytes
        result["int8_bytes_share"] = int8_gigabytes / gigabytes
        for way in ("shared_memory", "collective"):
            result[f"{way}_int8_vs_{way}"] = ratio(way, f"{way}_int8")
            longer = [r.stall[f"{way}_int8"] / r.stall[way] for r in rounds]
            result[f"{way}_int8_stall_vs_{way}"] = statistics.median(longer)
    for number in rounds[0].by_replicas:
        times = [r.by_replicas[number] / r.by_replicas["1"] for r in rounds]
        result[f"shared_memory_s_{number}_replicas_vs_1"] = statistics.median(times)
    for way, value in seconds.items():
        result[f"{way}_s"] = value
        moved = int8_gigabytes if way.endswith("_int8") else gigabytes
        result[f"{way}_gb_per_s_per_receiver"] = moved / value
    if task.ranks_per_replica > 1:
        wide = [(r.wide or 0.0) / r.seconds["collective"] for r in rounds]
        result[f"collective_s_{task.ranks_per_replica}_ranks_vs_1"] = statistics.median(wide)
    for way, value in stalls.items():
        result[f"{way}_trainer_stall_s"] = value
    for way in rounds[0].pause:
        pauses = [r.pause[way] for r in rounds]
        result[f"{way}_in_flight_pause_s"] = statistics.median(pause for pause, _, _ in pauses)
        beyond = [(pause - copy) / step for pause, step, copy in pauses]
        result[f"{way}_in_flight_pause_beyond_copy_in_steps"] = statistics.median(beyond)
    return result | {
        "collective_trainer_memory_mib": answer.trainer_memory / 2**20,
        "collective_generator_memory_mib": answer.generator_memory / 2**20,
        "shared_memory_file_mib": answer.shared_bytes / 2**20,
        "load_1min": os.getloadavg()[0],
        "cores": len(os.sched_getaffinity(0)),
    }


def _copies(task: Task) -> int:
    """Of the model that all processes together hold: trainers the weights, a copy, what a bare
    broadcast sends, four snapshots, two pairs of slots; a replica two copies, what it receives.
    For replicas of several ranks, another snapshot and a window each. With int8 another snapshot
    and a pair of slots; a replica a copy and what it receives; each smaller than the model."""
    wide = 1 + task.generators if task.ranks_per_replica > 1 else 0
    int8 = 3 + 2 * task.generators if task.quantization == "int8" else 0
    return 3 + 4 + 4 + (2 + 4) * task.generators + wide + int8


def _check_memory(need: int) -> None:
    import psutil

    free = psutil.virtual_memory().available
    if free < need:
        raise ConfigError(
            f"measuring this takes about {need >> 20:,} MiB of memory but {free >> 20:,} MiB are "
            "free; take a smaller --size, --dtype bf16 or fewer --generators"
        )


def _run(task: Task) -> Answer:
    """Start the ranks and wait for what their first one writes."""
    environment = os.environ | {
        MARKER: "bench",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    try:
        code, last = run_ranks(
            task.trainers + task.generators * task.ranks_per_replica,
            "llamarl_hpc.weight_sync.bench.rank",
            json.dumps(msgspec.to_builtins(task)),
            env=environment,
        )
    finally:
        remove_stale()  # what ranks that were killed have left in /dev/shm
    answer = Path(task.folder) / "answer.json"
    if code != 0 or not answer.exists():
        raise ConfigError(
            f"a process of the benchmark ended with code {code} ({last}); try a smaller --size or "
            "fewer processes"
        )
    return msgspec.json.decode(answer.read_bytes(), type=Answer)
