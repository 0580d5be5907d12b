"""How long a checkpoint will take, for a run that has to stop before Slurm ends its job.

    as long as the newest one of the run took (metrics.jsonl)
    before the first one: its size over what its folder takes, found out by writing a little there

The latter is a guess that is rather too short: every trainer rank is taken to write as fast as one
process here, and hashing is left out. So what it finds impossible is.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from pathlib import Path

from llamarl_hpc.config.schema import Config
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.models.load import tensor_shapes
from llamarl_hpc.observability.json_lines import read_json_lines
from llamarl_hpc.run_dir import RunDir

_BYTES_PER_PARAMETER = 12  # the weight and two moments, float32
_MIB = 1 << 20
_TRIAL_BLOCK = 4 * _MIB
_TRIAL_BLOCKS, _TRIAL_S = 32, 5.0
_EVERY_DISK = 20 * _MIB  # bytes per second that need no trial


def check_new_run(config: Config, model_folder: Path, folder: Path) -> None:
    """Before a job is submitted whose run folder will lie in `folder`. Raises ConfigError when a
    checkpoint takes longer than there is between Slurm's signal and the job's end."""
    needed_s = estimated_s(
        config, model_folder, folder, at_least_s=float(config.launch.signal_delay_s)
    )
    size = checkpoint_bytes(config, model_folder) / 2**30
    _check(config, needed_s, f"of {size:.1f} GiB would take {needed_s:.0f} s at least in {folder}")


def check_resumed_run(config: Config, run: RunDir) -> None:
    """The same for another job of a run, from what its newest checkpoint took."""
    took_s = last_measured_s(run)
    _check(config, took_s, f"of this run took {took_s:.0f} s")


def _check(config: Config, needed_s: float, found: str) -> None:
    delay_s = config.launch.signal_delay_s
    if needed_s > delay_s:
        raise ConfigError(
            f"a checkpoint {found}, but launch.signal_delay_s lets Slurm signal only {delay_s} s "
            f"before the job's end; raise it to {60 * math.ceil(2 * needed_s / 60)}, or choose a "
            "faster folder (runs_dir, --run-dir)"
        )


def expected_s(config: Config, model_folder: Path, run: RunDir) -> float:
    """Of the next checkpoint of a run, before this attempt has made one; 0 if it is small."""
    return last_measured_s(run) or estimated_s(config, model_folder, run.path, at_least_s=1.0)


def last_measured_s(run: RunDir) -> float:
    """Of the newest checkpoint of all attempts; 0 without one."""
    lines = read_json_lines(run.metrics)
    times = [line.get("time/checkpoint") for line in lines if line.get("event") == "checkpoint"]
    return float(times[-1] or 0.0) if times else 0.0


def estimated_s(config: Config, model_folder: Path, folder: Path, *, at_least_s: float) -> float:
    """Size over speed; 0, without a trial, where any disk would be quicker than `at_least_s`."""
    size = checkpoint_bytes(config, model_folder)
    if size <= at_least_s * _EVERY_DISK:
        return 0.0
    return size / (_bytes_per_second(folder) * config.resources.trainer.num_ranks)


def checkpoint_bytes(config: Config, model_folder: Path) -> int:
    """Of what the trainer writes: all parameters, or those of the LoRA adapters."""
    shapes, lora = tensor_shapes(model_folder), config.model.lora
    if lora is None:
        return _BYTES_PER_PARAMETER * sum(math.prod(shape) for shape in shapes.values())
    adapted = (
        shape
        for name, shape in shapes.items()
        if name.removesuffix(".weight").rpartition(".")[2] in lora.target_modules
    )
    return _BYTES_PER_PARAMETER * lora.r * sum(sum(shape) for shape in adapted)


def _bytes_per_second(folder: Path) -> float:
    """What one process writes and syncs, into the nearest folder above that is there."""
    place = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.is_dir())
    block = os.urandom(_TRIAL_BLOCK)  # nothing that a file system could compress
    try:
        with tempfile.TemporaryFile(dir=place, buffering=0) as file:
            start = time.perf_counter()
            written = 0
            for _ in range(_TRIAL_BLOCKS):
                written += file.write(block)
                if time.perf_counter() - start > _TRIAL_S:
                    break
            os.fsync(file.fileno())
            return written / (time.perf_counter() - start)
    except OSError:  # no room, no right: others say so, and better
        return math.inf
