"""Reading a model's config without transformers says what transformers says, or nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import write_tiny_model

from llamarl_hpc.generation.native.architecture import architecture_of
from llamarl_hpc.generation.native.model_config import load_config, read_plainly
from llamarl_hpc.generation.native.rotary import rotary_tables

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 50_000.0,
}
_LINEAR = {"rope_type": "linear", "factor": 2.0}

# (changes, whether they can be read plainly)
FILES: list[tuple[dict[str, Any], bool]] = [
    ({"model_type": "llama"}, True),
    ({"model_type": "llama", "head_dim": 32, "tie_word_embeddings": True}, True),
    ({"model_type": "llama", "attention_bias": True, "mlp_bias": True}, True),
    ({"model_type": "llama", "rope_scaling": None}, True),
    ({"model_type": "llama", "rope_scaling": _LINEAR}, False),
    ({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}}, False),
    ({"model_type": "llama", "num_key_value_heads": None}, False),
    ({"model_type": "llama", "rope_theta": None}, False),
    ({"model_type": "mistral", "sliding_window": None}, True),
    ({"model_type": "mistral", "sliding_window": 200}, True),
    ({"model_type": "mistral"}, False),
    ({"model_type": "qwen2", "sliding_window": 64}, True),
    ({"model_type": "qwen2", "sliding_window": 200, "use_sliding_window": True}, True),
    ({"model_type": "qwen2", "use_sliding_window": True}, False),
    ({"model_type": "qwen3", "head_dim": 32}, True),
    ({"model_type": "qwen3", "head_dim": 32, "attention_bias": True}, True),
    ({"model_type": "qwen3"}, False),
]


@pytest.mark.parametrize(("changes", "plain"), FILES)
def test_a_config_is_read_as_transformers_reads_it(
    tmp_path: Path, changes: dict[str, Any], plain: bool
) -> None:
    from transformers import AutoConfig

    values = {key: value for key, value in (_SIZES | changes).items() if key != "rope_theta"}
    if (_SIZES | changes)["rope_theta"] is not None:
        values["rope_theta"] = _SIZES["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    wanted = AutoConfig.from_pretrained(tmp_path, local_files_only=True)
    assert (read_plainly(tmp_path) is not None) == plain
    found = load_config(tmp_path)
    assert architecture_of(found, max_context=128) == architecture_of(wanted, max_context=128)
    tables = [rotary_tables(c, 128, torch.float32, torch.device("cpu")) for c in (found, wanted)]
    assert all(torch.equal(a, b) for a, b in zip(*tables, strict=True))


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_transformers_saves_is_read_plainly(tmp_path: Path, kind: str) -> None:
    from transformers import AutoConfig

    folder = write_tiny_model(tmp_path, kind)
    found = read_plainly(folder)
    wanted = AutoConfig.from_pretrained(folder, local_files_only=True)
    assert found is not None
    assert architecture_of(found, max_context=64) == architecture_of(wanted, max_context=64)


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "gpt2"}', '{"model_type": ["llama"]}'])
def test_other_files_are_left_to_transformers(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert read_plainly(tmp_path) is None


_PROGRAM = """
import sys
from pathlib import Path
import llamarl_hpc.executors.generator
from engine_runs import drain, engine_of, request
engine = engine_of(Path(sys.argv[1]))
engine.submit(request(0, [5, 6, 7], max_tokens=2))
assert drain(engine)
print(*sorted(sys.modules), sep="\\n")
"""


def test_a_generator_imports_neither_transformers_nor_a_compiler(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(folder)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert {"transformers", "sympy", "torch._dynamo"}.isdisjoint(done.stdout.split())
