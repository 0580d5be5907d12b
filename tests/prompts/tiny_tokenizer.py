"""A tokenizer folder made here: bytes as tokens, BOS by convention, a chat template with BOS."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_tokenizer(
    folder: Path, *, template: str | None = TEMPLATE, adds_bos: bool = True, **settings: Any
) -> Path:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = ["<s>", "</s>", "[user]", "[assistant]", "[system]"]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    if adds_bos:
        bos = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", bos)])
    tokenizer.enable_truncation(8)  # a setting that some published tokenizers carry; ignored here
    tokenizer.enable_padding(length=8, pad_token="</s>")
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    config |= {"bos_token": {"__type": "AddedToken", "content": "<s>", "special": True}} | settings
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
