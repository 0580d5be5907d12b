"""LoRA: only low-rank corrections are trained, the generators get whole merged weights.

    weight that is used = W + alpha / r * B @ A        W frozen [out, in], A [r, in], B [out, r]

peft puts the adapters into the model. Merging is done here, for any range of elements, so that
weights travel as they always do; a checkpoint holds the adapters only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llamarl_hpc.config.schema import LoraConfig
from llamarl_hpc.errors import ConfigError

_A, _B = ".lora_A.weight", ".lora_B.weight"
_WEIGHT = ".weight"


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The correction of one matrix."""

    a: Tensor  # [r, in]
    b: Tensor  # [out, r]
    scaling: float

    def merge(self, base: Tensor, start: int, end: int) -> Tensor:
        """Elements [start, end) of the flattened merged matrix, given those of the frozen one;
        computed in float32, in the dtype of `base`."""
        width = self.a.shape[1]
        first, last = start // width, -(-end // width)
        delta = (self.b[first:last].float() @ self.a.float()) * self.scaling
        part = delta.view(-1)[start - first * width : end - first * width]
        return (base.float() + part).to(base.dtype)


def add_adapters(causal_lm: Any, config: LoraConfig, *, seed: int) -> None:
    """Freeze the model and put adapters beside its target matrices: A random by `seed`, B zero.

    Raises ConfigError when the model has no module of a given name.
    """
    peft = _import_peft()
    _check_targets(causal_lm, config.target_modules)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(_peft_config(config), causal_lm)
    for name, parameter in causal_lm.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.to(causal_lm.dtype)
        else:
            parameter.requires_grad_(False)


def plain_name(name: str) -> str:
    """Of a parameter in a model with adapters: its own without, and adapters without a nick."""
    return name.replace(".base_layer.", ".").replace(".default.", ".")


def adapters_of(trained: Mapping[str, Tensor], config: LoraConfig) -> dict[str, Adapter]:
    """Name of the merged weight -> its adapter, from the tensors called `...lora_A.weight`."""
    return {
        name.removesuffix(_A) + _WEIGHT: Adapter(
            a=a, b=trained[name.removesuffix(_A) + _B], scaling=config.alpha / config.r
        )
        for name, a in trained.items()
        if name.endswith(_A)
    }


def merge_all(
    base: Iterator[tuple[str, Tensor]], adapters: Mapping[str, Adapter], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Whole weights in `dtype`, adapters merged in where there are some."""
    for name, tensor in base:
        weight = tensor.to(dtype)
        if name in adapters:
            flat = adapters[name].merge(weight.reshape(-1), 0, weight.numel())
            weight = flat.view(weight.shape)
        yield name, weight


def save_adapter(
    trained: Mapping[str, Tensor], config: LoraConfig, model_path: str, out: Path
) -> None:
    """The adapters alone, as a folder that peft loads. Raises ConfigError when `out` is taken."""
    from safetensors.torch import save_file

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty; choose another --out")
    settings = _peft_config(config)
    settings.base_model_name_or_path = model_path
    settings.inference_mode = True
    settings.save_pretrained(str(out))
    tensors = {f"base_model.model.{name}": t.contiguous() for name, t in trained.items()}
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})


def _peft_config(config: LoraConfig) -> Any:
    return _import_peft().LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,
        target_modules=list(config.target_modules),
        lora_dropout=config.dropout,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _check_targets(model: nn.Module, targets: list[str]) -> None:
    linear = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    unknown = sorted(set(targets) - linear)
    if unknown:
        raise ConfigError(
            f"model.lora.target_modules names {unknown[0]}, but the linear layers of this model "
            f"are called {', '.join(sorted(linear))}; name some of them"
        )


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            "model.lora needs peft, which is not installed; run: pip install 'llamarl-hpc[lora]'"
        ) from error
    return peft
