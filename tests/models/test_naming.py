"""Tied parameters are found by storage and counted once."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_model import write_tiny_model

from llamarl_hpc.models.load import load_trainer_model
from llamarl_hpc.models.naming import named_unique_tensors, tied_aliases


def test_a_tied_model_has_one_entry_and_an_alias(tmp_path: Path) -> None:
    model = load_trainer_model(write_tiny_model(tmp_path, tied=True))
    names = [name for name, _ in named_unique_tensors(model)]
    assert tied_aliases(model) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert names[0] == "model.embed_tokens.weight" and "lm_head.weight" not in names
    total = sum(tensor.numel() for _, tensor in named_unique_tensors(model))
    assert total == model.num_parameters()


def test_an_untied_model_has_no_alias(tmp_path: Path) -> None:
    model = load_trainer_model(write_tiny_model(tmp_path, tied=False))
    assert tied_aliases(model) == {}
    assert "lm_head.weight" in dict(named_unique_tensors(model))


def test_two_parameters_over_one_memory_are_one_and_equal_values_are_two() -> None:
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(torch.ones(4))
    model.b = torch.nn.Parameter(model.a.data)  # another object, the same memory
    model.c = torch.nn.Parameter(torch.ones(4))
    model.d = torch.nn.Parameter(model.a.data[:2])  # a part of it is another tensor
    assert [name for name, _ in named_unique_tensors(model)] == ["a", "c", "d"]
    assert tied_aliases(model) == {"b": "a"}


def test_parameters_without_memory_are_told_apart() -> None:
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(torch.empty(0))  # as ZeRO-3 leaves them outside the forward
    model.b = torch.nn.Parameter(torch.empty(0))
    model.c = model.a
    assert [name for name, _ in named_unique_tensors(model)] == ["a", "b"]
    assert tied_aliases(model) == {"c": "a"}
    meta = torch.nn.Linear(3, 3, device="meta")
    assert [name for name, _ in named_unique_tensors(meta)] == ["weight", "bias"]
