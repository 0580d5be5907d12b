"""From a question to the exact tokens the model is shown: rendered once, tokenised once.

The ids made here are the only ones that generator and trainer ever see, so there is one place
for the rules on special tokens: with `chat` the template is the authority and the tokenizer adds
nothing; with `plain` the beginning-of-sequence token is added if this tokenizer wants one.
Torch is not imported (unless a folder has only a slow tokenizer).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from llamarl_hpc.config.schema import DataConfig
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.models.tokenizer import SPECIAL, read_settings, read_tokenizer
from llamarl_hpc.types import Array

# The day that a chat template prints is always this one, so that a run resumed tomorrow shows
# the model the same prompts.
_TODAY = datetime(2026, 1, 1)


class Renderer:
    """Renders and tokenises the questions of one run. Raises ConfigError on an unusable folder."""

    def __init__(self, folder: Path, data: DataConfig) -> None:
        self.data = data
        self.tokenizer, self.settings = read_tokenizer(folder)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.bos = self.settings.get("bos_token")
        self.template = _chat_template(folder, self.settings) if data.template == "chat" else None

    def render(self, questions: Sequence[str]) -> list[str]:
        """The text of each prompt, special tokens included."""
        contents = [self.data.prompt_format.replace("{prompt}", text) for text in questions]
        if self.template is None:
            bos = self.bos if self.bos and self._adds_bos() else ""
            return [text if text.startswith(bos) else bos + text for text in contents]
        return self._render_chat(contents)

    def tokenize(self, texts: Sequence[str]) -> list[Array]:
        """int32 [P] per text. Nothing is added: `texts` come from `render`."""
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]
        bos = self.tokenizer.token_to_id(self.bos) if self.bos else None
        for text, row in zip(texts, ids, strict=True):
            if bos is not None and len(row) > 1 and row[0] == bos and row[1] == bos:
                raise ConfigError(
                    f"a prompt begins with two '{self.bos}' tokens ({text[:60]!r}); take the one "
                    "out of data.prompt_format or of the data"
                )
        return ids

    def _render_chat(self, contents: Sequence[str]) -> list[str]:
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        system = self.data.system_prompt
        head = [] if system is None else [{"role": "system", "content": system}]
        try:
            texts, _ = render_jinja_template(
                conversations=[[*head, {"role": "user", "content": text}] for text in contents],
                chat_template=self.template,
                add_generation_prompt=True,
                **{name: self.settings[name] for name in SPECIAL if name in self.settings},
            )
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"the model's chat template refused the prompt ({error}); change "
                "data.system_prompt or set data.template to plain"
            ) from error
        return [str(text) for text in texts]

    def _adds_bos(self) -> bool:
        """Whether this tokenizer, left to itself, begins a text with its BOS token."""
        with_special = self.tokenizer.encode("a", add_special_tokens=True).tokens
        return bool(with_special) and with_special[0] == self.bos


# ------------------------------------------------------------------------------ the folder


def _chat_template(folder: Path, settings: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return _fixed_date(file.read_text(encoding="utf-8"))
    template = settings.get("chat_template") or read_settings(folder / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(template, list):  # several by name
        named = {item["name"]: item["template"] for item in template}
        template = named.get("default")
    if isinstance(template, str):
        return _fixed_date(template)
    raise ConfigError(
        f"the tokenizer in {folder} has no chat template; set data.template to plain, or use an "
        "instruction-tuned model"
    )


def _fixed_date(template: str) -> str:
    """The template with a `strftime_now` of its own that knows no clock."""
    if "strftime_now" not in template:
        return template
    replaced = "".join(
        f"|replace('%{code}', '{_TODAY.strftime('%' + code)}')" for code in "aAbBdHIjmMpSyY"
    )
    macro = "{% macro strftime_now(format) %}{{ format" + replaced + " }}{% endmacro +%}"
    return macro + template
