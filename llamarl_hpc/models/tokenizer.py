"""A model folder's tokenizer, as the run uses it: the `tokenizers` library reading tokenizer.json.

transformers is imported for folders that have an older form only: it costs seconds of processor
time and a thousand files in every process.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarl_hpc.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_SLOW_FILES = ("tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")


def read_tokenizer(folder: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer of a model folder, and its tokenizer_config with plain texts."""
    settings = {
        **read_settings(folder / "special_tokens_map.json"),
        **read_settings(folder / "tokenizer_config.json"),
    }
    settings = {name: _content(value) for name, value in settings.items()}
    if (folder / "tokenizer.json").is_file():
        import tokenizers

        try:
            return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")), settings
        except Exception as error:  # the Rust side raises bare Exception
            raise ConfigError(f"cannot read {folder / 'tokenizer.json'}: {error}") from error
    if any((folder / name).is_file() for name in _SLOW_FILES):
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        settings |= {name: str(token) for name, token in slow.special_tokens_map.items()}
        return slow.backend_tokenizer, settings
    raise ConfigError(
        f"the model folder {folder} has no tokenizer (no tokenizer.json); copy the tokenizer "
        "files of the base model into it"
    )


class Decoder:
    """From a completion's tokens to its text, without special tokens."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError on an unusable folder."""
        self._tokenizer, settings = read_tokenizer(folder)
        eos = settings.get("eos_token")
        self.eos_token_id: int | None = self._tokenizer.token_to_id(eos) if eos else None
        # What only the settings call special is so, too.
        named = [settings.get(name) for name in SPECIAL]
        more = settings.get("additional_special_tokens") or settings.get("extra_special_tokens")
        named += more if isinstance(more, list) else []
        named += [
            token.get("content")
            for token in dict(settings.get("added_tokens_decoder") or {}).values()
            if token.get("special")
        ]
        texts = {str(_content(token)) for token in named if token}
        self._tokenizer.add_special_tokens(
            [text for text in sorted(texts) if self._tokenizer.token_to_id(text) is not None]
        )

    def texts(self, completions: Sequence[Sequence[int]]) -> list[str]:
        """The text of each."""
        return self._tokenizer.decode_batch(
            [list(ids) for ids in completions], skip_special_tokens=True
        )


def read_settings(path: Path) -> dict[str, Any]:
    """The values of a JSON file; {} if there is none."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error})") from error
    return value if isinstance(value, dict) else {}


def _content(token: Any) -> Any:
    """`"<s>"` and `{"content": "<s>", ...}` both name a token."""
    return token["content"] if isinstance(token, dict) and "content" in token else token
