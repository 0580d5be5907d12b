"""Random models of a few kilobytes, as Hugging Face folders with a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

EOS, PAD = 2, 0  # ids; every folder's end-of-sequence token is "<eos>"
VOCAB = 512

_SPECIAL = ["<pad>", "<bos>", "<eos>"]


def write_tiny_model(
    folder: Path, kind: str = "llama", *, seed: int = 0, tied: bool = True, **overrides: Any
) -> Path:
    """A 2-layer model of width 64 with uneven next-token probabilities, and its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "use_cache": True,
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values | overrides))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms start as 1 and biases as 0, which hides mistakes
                parameter.add_(torch.randn_like(parameter) * 0.1)
            assert torch.isfinite(parameter).all(), name
    model.save_pretrained(folder)
    write_tiny_tokenizer(folder)
    return folder


def write_tiny_tokenizer(folder: Path, *, pad_token: str = "<pad>") -> None:
    """Byte-level, without merges: text is its bytes. Ids above 258 decode to "w<id>"."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = _SPECIAL + alphabet
    tokens += [f"w{i}" for i in range(len(tokens), VOCAB)]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = (
        "{% for m in messages %}<bos>{{ m['role'] }}: {{ m['content'] }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<bos>assistant: {% endif %}"
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token=pad_token,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
