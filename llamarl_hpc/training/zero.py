"""Everything that knows DeepSpeed: its settings, its start, and where its partitions lie.

One process group per executor: the caller has initialised torch.distributed over exactly the
ranks of this trainer (`placement.init_process_group`), and DeepSpeed adopts it. Its own discovery
(MPI, hostname, ssh) never runs, and no operator is compiled.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llamarl_hpc.config.schema import TrainerConfig
from llamarl_hpc.placement import World

# Elements in one reduce or all-gather. DeepSpeed's 5e8 would reserve 2 GB for a small model.
_BUCKET_NUMEL = 50_000_000


def start_engine(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: TrainerConfig,
    world: World,
    device: torch.device,
) -> Any:
    """A DeepSpeedEngine around `model`; all ranks of `world` call this together."""
    assert dist.is_initialized() and dist.get_world_size() == world.size, (
        "placement.init_process_group comes first"
    )
    deepspeed = import_deepspeed(device.type)
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    arguments = SimpleNamespace(device_rank=device.index) if device.index is not None else None
    with redirect_stdout(io.StringIO()):  # reports of memory that no log level silences
        engine, *_ = deepspeed.initialize(
            args=arguments,
            model=model,
            optimizer=optimizer,
            config=engine_settings(config, device.type, num_trained),
        )
    # Stage 0 in bf16 makes its moments by a step with gradient 0, which would count as the first
    # one in Adam's bias correction.
    if config.zero_stage == 0:
        engine.basic_optimizer.state.clear()
    if world.size == 1 and leaves_clipping_to_us(config):
        # The sum over one rank: a second copy of all gradients, and nothing else.
        engine.enable_backward_allreduce = False
    return engine


def import_deepspeed(device_type: str) -> Any:
    """The module, told once and for all which device it serves and to compile nothing."""
    os.environ.setdefault("DS_ACCELERATOR", device_type)
    # DeepSpeed calls collectives by names that torch has renamed; a warning for each call.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    import deepspeed

    # The only operator that DeepSpeed builds unasked; gloo does the same without a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _import_muon()
    return deepspeed


def _import_muon() -> None:
    """Every ZeRO engine asks whether its optimizer is Muon, whose functions torch would compile at
    import: two seconds of processor time and 500 files a rank, for what is not used here."""
    compile_ = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]
    try:
        with suppress(ImportError):  # a version without it
            import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        torch.compile = compile_


def engine_settings(config: TrainerConfig, device_type: str, num_trained: int) -> dict[str, Any]:
    """DeepSpeed's configuration. Accumulation and schedule are ours, so it sees one micro-batch
    per step and a constant rate."""
    bf16 = config.dtype == "bf16"
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0 if leaves_clipping_to_us(config) else config.max_grad_norm,
        "steps_per_print": 1 << 62,
        "zero_optimization": {
            "stage": config.zero_stage,
            "overlap_comm": device_type == "cuda",
            # made whole, however little is trained (LoRA)
            "reduce_bucket_size": min(_BUCKET_NUMEL, num_trained),
            "allgather_bucket_size": _BUCKET_NUMEL,
        },
        "bf16": {"enabled": bf16},
    }
    host = {"device": "cpu", "pin_memory": device_type == "cuda"}
    if config.offload_optimizer:
        settings["zero_optimization"]["offload_optimizer"] = host
        # torch's fused AdamW steps on the host as well; DeepSpeed's own would be compiled first
        settings["zero_force_ds_cpu_optimizer"] = False
    if config.offload_parameters:
        settings["zero_optimization"]["offload_param"] = host
    if bf16 and config.zero_stage > 0:
        settings["communication_data_type"] = "fp32"
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def leaves_clipping_to_us(config: TrainerConfig) -> bool:
    """Whether DeepSpeed runs the bare optimizer, without a norm or a check for nan.

    That is stage 0 in float32; gradients are then whole on every rank when the step is due.
    """
    return config.zero_stage == 0 and config.dtype == "fp32"


def is_partitioned(parameter: Tensor) -> bool:
    """Whether ZeRO-3 keeps only a part of it on this rank."""
    return hasattr(parameter, "ds_tensor")


def full_shape(parameter: Tensor) -> tuple[int, ...]:
    shape = parameter.ds_shape if is_partitioned(parameter) else parameter.shape  # type: ignore[attr-defined]
    return tuple(int(n) for n in shape)


def partition_range(parameter: Tensor, world: World) -> tuple[int, int]:
    """Elements [start, end) of the flattened parameter in this rank's ZeRO-3 partition.

    Partitions are equally long and the last one is padded; late ranks of a tiny parameter may
    hold nothing but padding (start == end).
    """
    numel, length = int(parameter.ds_numel), int(parameter.ds_tensor.numel())  # type: ignore[attr-defined]
    return min(world.rank * length, numel), min((world.rank + 1) * length, numel)


def local_elements(parameter: Tensor, world: World, start: int, end: int) -> Tensor:
    """1-D view of elements [start, end), which must lie on this rank."""
    if not is_partitioned(parameter):
        return parameter.detach().view(-1)[start:end]
    first, last = partition_range(parameter, world)
    assert first <= start <= end <= last, f"[{start}, {end}) is not on rank {world.rank}"
    shard: Tensor = parameter.ds_tensor.detach()  # type: ignore[attr-defined]
    return shard[start - first : end - first]


@contextmanager
def gathered(parameter: Tensor) -> Iterator[Tensor]:
    """The whole parameter, for reading; a collective over all ranks under ZeRO-3."""
    if not is_partitioned(parameter):
        yield parameter.detach()
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        yield parameter.detach()
