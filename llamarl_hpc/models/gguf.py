"""GGUF file -> Hugging Face folder (float32 safetensors, tokenizer, chat template), torch-free.

Reads Llama-type files with a byte-level BPE vocabulary. The header is parsed here, in one pass over
the mapped file: the reader of `gguf` makes arrays of every vocabulary entry and takes half a
minute. Blocks are decoded by `gguf`. Left out: other architectures.
"""

from __future__ import annotations

import json
import mmap
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.types import Array

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of special tokens
_DIGIT_BY_DIGIT = {"smollm"}  # tokenizer.ggml.pre whose numbers are split into single digits
_WHOLE_WORDS = {"default", "gpt-2"}

# GGUF name of a layer's tensor -> Hugging Face name
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    name: str
    shape: tuple[int, ...]  # outermost first, as torch and numpy write it
    block_type: int  # ggml's number of the storage format
    offset: int  # bytes from the start of the file


@dataclass(frozen=True, kw_only=True)
class GgufHeader:
    metadata: dict[str, Any]
    tensors: list[GgufTensor]


def convert_gguf(path: Path, out: Path) -> None:
    """Write the model in `path` as a Hugging Face folder into the existing folder `out`."""
    from safetensors.numpy import save_file

    header = read_header(path)
    metadata = header.metadata
    kind = (metadata.get("general.architecture"), metadata.get("tokenizer.ggml.model"))
    if kind != ("llama", "gpt2"):
        raise ConfigError(
            f"{path.name} holds a {kind[0]} model with a {kind[1]} tokenizer, but only llama "
            "models with a gpt2 (byte-level BPE) tokenizer are converted; give a Hugging Face "
            "folder as model.path"
        )
    tensors = dict(_hf_tensors(path, header))
    config = _model_config(metadata, tied="lm_head.weight" not in tensors)
    _write_json(out / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(out / "generation_config.json", ids)
    _write_tokenizer(metadata, out)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(out / "config.json", out / "model.safetensors")  # it is made with 0600


def read_header(path: Path) -> GgufHeader:
    """All metadata and the table of tensors. Raises ConfigError when it is not a GGUF file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data)
        magic, version = cursor.unpack("4sI")
        if magic != b"GGUF" or version not in (2, 3):
            raise ConfigError(f"{path} is not a GGUF file of version 2 or 3; install it again")
        num_tensors, num_keys = cursor.unpack("QQ")
        metadata = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(num_keys)}
        table = [cursor.tensor() for _ in range(num_tensors)]
        align = int(metadata.get("general.alignment", 32))
        start = -(-cursor.position // align) * align
    tensors = [
        GgufTensor(name=name, shape=shape, block_type=block_type, offset=start + offset)
        for name, shape, block_type, offset in table
    ]
    return GgufHeader(metadata=metadata, tensors=tensors)


class _Cursor:
    """Reads values one after the other from a little-endian buffer."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self._data, self.position)
        self.position += struct.calcsize("<" + layout)
        return values

    def scalar(self, layout: str) -> Any:
        return self.unpack(layout)[0]

    def string(self) -> str:
        length = self.scalar("Q")
        self.position += length
        return self._data[self.position - length : self.position].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        inner, length = self.unpack("IQ")
        if inner in _SCALARS:
            return list(self.unpack(f"{length}{_SCALARS[inner]}"))
        return [self.value(inner) for _ in range(length)]

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        shape = self.unpack(f"{self.scalar('I')}Q")
        block_type, offset = self.unpack("IQ")
        return name, tuple(reversed(shape)), block_type, offset


def _hf_tensors(path: Path, header: GgufHeader) -> Iterator[tuple[str, Array]]:
    """(Hugging Face name, float32 array) of every tensor."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    data = np.memmap(path, mode="r")
    heads = int(header.metadata["llama.attention.head_count"])
    kv_heads = int(header.metadata.get("llama.attention.head_count_kv", heads))
    for tensor in header.tensors:
        kind = GGMLQuantizationType(tensor.block_type)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        row_bytes = tensor.shape[-1] // block * block_bytes
        num_rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
        raw = data[tensor.offset : tensor.offset + num_rows * row_bytes]
        if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            raw = raw.view(np.float32 if kind == GGMLQuantizationType.F32 else np.float16)
            values = raw.reshape(tensor.shape).astype(np.float32)
        else:
            values = dequantize(raw.reshape(num_rows, row_bytes), kind).reshape(tensor.shape)
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            values = _rotary_halves(values, heads if ".attn_q." in tensor.name else kv_heads)
        yield _hf_name(tensor.name), np.ascontiguousarray(values, dtype=np.float32)


def _rotary_halves(values: Array, heads: int) -> Array:
    """GGUF interleaves the two rotary halves of each head (rows); put them one after the other."""
    half = values.shape[0] // heads // 2
    return values.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(values.shape)


def _hf_name(name: str) -> str:
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    raise ConfigError(
        f"the GGUF file holds a tensor {name} that a plain Llama model does not have; "
        "give a Hugging Face folder as model.path"
    )


def _model_config(metadata: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    def llama(key: str, default: Any = None) -> Any:
        return metadata.get(f"llama.{key}", default)

    heads = int(llama("attention.head_count"))
    token_ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    padding = metadata.get("tokenizer.ggml.padding_token_id", token_ids["eos"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": llama("embedding_length"),
        "intermediate_size": llama("feed_forward_length"),
        "num_hidden_layers": llama("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": llama("attention.head_count_kv", heads),
        "head_dim": llama("rope.dimension_count", llama("embedding_length") // heads),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "max_position_embeddings": llama("context_length"),
        # stored as float32: 9.999999747e-06 is meant as 1e-05
        "rms_norm_eps": float(f"{llama('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(llama("rope.freq_base", 10_000.0)),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": tied,
        "use_cache": True,
        "bos_token_id": token_ids["bos"],
        "eos_token_id": token_ids["eos"],
        "pad_token_id": padding,
        "dtype": "float32",
    }


def _write_tokenizer(metadata: dict[str, Any], out: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind = metadata.get("tokenizer.ggml.pre", "default")
    if kind not in _DIGIT_BY_DIGIT | _WHOLE_WORDS:
        raise ConfigError(
            f"the GGUF file splits text by the rule '{kind}', but only "
            f"{', '.join(sorted(_DIGIT_BY_DIGIT | _WHOLE_WORDS))} are known; "
            "give a Hugging Face folder as model.path"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    bpe = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer(bpe)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([digits, words]) if kind in _DIGIT_BY_DIGIT else words
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    special = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])

    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in named.items()}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=metadata["llama.context_length"],
        **{f"{name}_token": tokens[i] for name, i in ids.items() if i is not None},
    ).save_pretrained(out)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
