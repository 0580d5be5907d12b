"""What `llamarl-hpc bench weight-sync` and its processes tell each other."""

from __future__ import annotations

import msgspec

from llamarl_hpc.types import ParameterSpec


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks are told."""

    folder: str
    size: str
    parameters: int  # millions, of size "custom"
    dtype: str
    trainers: int
    generators: int
    zero_stage: int
    rounds: int
    ranks_per_replica: int = 1  # of those that are measured beside
    quantization: str = "none"  # int8: transports are measured with it, too


class Transport(msgspec.Struct, frozen=True, kw_only=True):
    """One that is measured: its keys of `weight_sync`."""

    keys: dict[str, str]
    is_int8: bool = False  # quantised at the sender


def transports(quantization: str) -> dict[str, Transport]:
    """Those that are measured, by the name that they have in the figures."""
    shared = {"transport": "shared_memory"}
    collective = {"transport": "collective"}
    found = {
        "shared_memory": Transport(keys=shared | {"verify": "off"}),
        "shared_memory_verified": Transport(keys=shared | {"verify": "full"}),
        "collective": Transport(keys=collective | {"verify": "off"}),
        "collective_verified": Transport(keys=collective | {"verify": "full"}),
        "collective_delta": Transport(keys=collective | {"verify": "off", "delta": "auto"}),
    }
    if quantization == "int8":
        for way in ("shared_memory", "collective"):
            found[f"{way}_int8"] = Transport(keys=found[way].keys, is_int8=True)
    return found


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks found: seconds by way."""

    seconds: dict[str, float]
    stall: dict[str, float]  # for which the slowest trainer rank was kept
    # of the slowest replica, which decodes meanwhile: seconds between the last step on the old
    # weights and the first on the new ones, of a step, and of a plain copy of all weights
    pause: dict[str, tuple[float, float, float]]
    by_replicas: dict[str, float]  # shared_memory, with so many replicas
    wide: float | None = None  # collective, to replicas of `ranks_per_replica`


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    num_bytes: int  # of a version as the trainer has it
    rounds: list[Round]
    trainer_memory: int  # bytes that the collective transport takes on a trainer rank
    generator_memory: int
    shared_bytes: int  # of one transport's file in /dev/shm
    int8_bytes: int = 0  # of a version as generators with int8 weights get it


def model_specs(size: str, dtype: str, parameters: int) -> list[ParameterSpec]:
    """The tensors of a Llama-like model: SmolLM2-135M, Llama-3.2-1B, or so many millions."""
    vocab, width, inner, kv, layers = {
        "135m": (49_152, 576, 1536, 192, 30),
        "1b": (128_256, 2048, 8192, 512, 16),
        "custom": (4096, 512, 1408, 128, 0),
    }[size]
    block = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    if size == "custom":
        numel = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in block.values())
        layers = max((parameters * 1_000_000 - vocab * width) // numel, 1)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, width)}
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": s for name, s in block.items()}
    shapes["model.norm.weight"] = (width,)
    name = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    return [ParameterSpec(name=n, shape=shape, dtype=name) for n, shape in shapes.items()]
