"""The engine's int8 layers: right products, a row on its own, parts that add up, whole models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import engine_of, random_prompts, request, run
from tiny_model import write_tiny_model

from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.generation.native import int8_linear
from llamarl_hpc.generation.native.int8_linear import Int8Linear
from llamarl_hpc.models.int8 import quantised
from llamarl_hpc.models.load import load_trainer_model
from llamarl_hpc.models.naming import named_unique_tensors

CPU = torch.device("cpu")
OUTPUTS = {"layers.a": 40, "layers.b": 23}
Weights = dict[str, torch.Tensor]


def _weights(inputs: int, *, bias: bool = True) -> Weights:
    generator = torch.Generator().manual_seed(inputs)
    shapes = {f"{n}.weight": (rows, inputs) for n, rows in OUTPUTS.items()}
    biases = {f"{n}.bias": (rows,) for n, rows in OUTPUTS.items() if bias}
    return {n: torch.randn(*s, generator=generator) for n, s in (shapes | biases).items()}


def _layer(
    weights: Weights, inputs: int, *, bias: bool = True, dtype: torch.dtype = torch.float32
) -> Int8Linear:
    """`weights`: quantised."""
    layer = Int8Linear(OUTPUTS, inputs, bias=bias, dtype=dtype, device=CPU)
    for name, (shape, load) in layer.destinations().items():
        assert weights[name].shape == shape
        load(weights[name])
    return layer


def _exact(weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """In float64, from what was quantised."""
    parts = []
    for name in OUTPUTS:
        restored = weights[f"{name}.weight"].double()
        restored = restored * weights[f"{name}.weight_scale"].double().unsqueeze(1)
        y = x.double() @ restored.T
        parts.append(y + weights[f"{name}.bias"].double() if f"{name}.bias" in weights else y)
    return torch.cat(parts, dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [1 << 19, 700])
@pytest.mark.parametrize("onednn", [True, False])
def test_products_are_those_of_the_restored_matrices(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, block: int, onednn: bool
) -> None:
    monkeypatch.setattr(int8_linear, "_CPU_BLOCK", block)
    if not onednn:
        monkeypatch.setattr(int8_linear, "has_onednn", lambda: False)
    for inputs, bias in ((64, True), (50, False)):
        weights = dict(quantised(_weights(inputs, bias=bias).items()))
        if dtype == torch.bfloat16:  # biases are of the engine's dtype
            weights = {n: t.to(dtype) if "bias" in n else t for n, t in weights.items()}
        x = torch.randn(9, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
        y = _layer(weights, inputs, bias=bias, dtype=dtype)(x)
        assert y.dtype == dtype and y.shape == (9, 63)
        error = (y.double() - _exact(weights, x)).abs().max()
        assert error < (1e-4 if dtype == torch.float32 else 0.3)


@pytest.mark.parametrize("block", [1 << 19, 1000])
def test_a_rows_result_does_not_depend_on_the_other_rows(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """To the bit where that is so for the engine's other layers, to rounding elsewhere."""
    monkeypatch.setattr(int8_linear, "_CPU_BLOCK", block)
    capability = torch.backends.cpu.get_cpu_capability()
    tolerance = 0.0 if capability in ("AVX2", "AVX512") else 1e-4
    for inputs in (64, 96, 576):
        layer = _layer(dict(quantised(_weights(inputs).items())), inputs)
        x = torch.randn(150, inputs, generator=torch.Generator().manual_seed(2))
        together = layer(x)
        for num in (*range(2, 10), 15, 16, 31, 33, 64, 100, 149):
            for start in (0, 150 - num):
                alone = layer(x[start : start + num].contiguous())
                assert (alone - together[start : start + num]).abs().max() <= tolerance


def test_parts_by_rows_are_rows_and_parts_by_columns_add_up() -> None:
    weights = dict(quantised(_weights(64, bias=False).items()))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
    whole = _layer(weights, 64, bias=False)(x)
    summands = []
    for columns in (slice(0, 24), slice(24, 64)):
        cut = {n: t[:, columns] if t.ndim == 2 else t for n, t in weights.items()}
        layer = _layer(cut, columns.stop - columns.start, bias=False)
        summands.append(layer(x[:, columns].contiguous()))
    assert torch.allclose(summands[0] + summands[1], whole, atol=1e-4)
    part = Int8Linear({"layers.a": 13}, 64, bias=False, dtype=torch.float32, device=CPU)
    for name, (_, load) in part.destinations().items():
        load(weights[name][7:20])
    assert torch.allclose(part(x), whole[:, 7:20], atol=1e-5)


# ------------------------------------------------------------------ in the engine


def _restored(folder: Path) -> Any:
    """The trainer's model with what the generator keeps of its weights."""
    model = load_trainer_model(folder)
    kept = dict(quantised(named_unique_tensors(copy.deepcopy(model))))
    with torch.no_grad():
        for name, parameter in named_unique_tensors(model):
            scales = kept.get(f"{name}_scale")
            if scales is not None:
                parameter.copy_(kept[name].float() * scales.unsqueeze(1))
    return model


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama", {}),
        ("llama", {"tied": False, "attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"use_sliding_window": False}),
        ("qwen3", {"use_sliding_window": False, "head_dim": 32}),
    ],
)
def test_logprobs_are_those_of_the_quantised_policy(
    tmp_path: Path, kind: str, config: dict[str, Any]
) -> None:
    folder = write_tiny_model(tmp_path, kind, **config)
    prompts = random_prompts(4)
    requests = [request(i, p, n=3, max_tokens=10) for i, p in enumerate(prompts)]
    done = run(engine_of(folder, int8=True), requests)
    near, far = _restored(folder), load_trainer_model(folder)
    differences = []
    for i, prompt in enumerate(prompts):
        for completion in done[i].completions:
            ids = torch.tensor([prompt + completion.token_ids.tolist()])
            with torch.no_grad():
                for model, wanted in ((near, True), (far, False)):
                    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
                    logprobs = logits.float().log_softmax(-1)
                    true = logprobs.gather(1, ids[0, len(prompt) :].unsqueeze(1)).squeeze(1)
                    gap = np.abs(completion.logprobs - true.numpy()).max()
                    if wanted:
                        assert gap < 1e-4
                    else:
                        differences.append(gap)
    assert 1e-3 < max(differences) < 1.0  # and not those of the policy in full precision


def test_new_weights_come_quantised_or_are_refused(folder: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", seed=9)
    requests = [request(i, p, n=2) for i, p in enumerate(random_prompts(3))]
    engine = engine_of(folder, int8=True)
    before = run(engine, requests)
    new = named_unique_tensors(load_trainer_model(other))
    engine.load_weights(1, quantised(new))
    updated, fresh = run(engine, requests), run(engine_of(other, int8=True), requests)
    for i in range(3):
        for a, b, old in zip(
            updated[i].completions, fresh[i].completions, before[i].completions, strict=True
        ):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert a.logprobs.tolist() == b.logprobs.tolist()
            assert a.token_ids.tolist() != old.token_ids.tolist()
    with pytest.raises(WeightSyncError, match=r"14 weights did not come.*q_proj\.weight_scale"):
        engine.load_weights(2, new)
    with pytest.raises(WeightSyncError, match=r"no weight .*q_proj\.weight_scale"):
        engine_of(folder).load_weights(2, quantised(new))


def test_a_group_gets_the_same_tokens_alone_and_in_company(folder: Path) -> None:
    requests = [request(i, p, n=3, max_tokens=4 + i) for i, p in enumerate(random_prompts(5))]
    together = run(engine_of(folder, int8=True, max_concurrency=15, prefill_tokens=64), requests)
    for i in (0, 4):
        alone = run(engine_of(folder, int8=True), [requests[i]])[i]
        for a, b in zip(alone.completions, together[i].completions, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
