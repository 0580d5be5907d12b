"""The tokens the model is shown: one BOS where one belongs, nothing added, nothing cut."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tokenizer import TEMPLATE, write_tokenizer

from llamarl_hpc.config.schema import DataConfig
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.prompts.template import Renderer


def shown(folder: Path, question: str = "1+1=", **data: Any) -> tuple[str, list[str]]:
    renderer = Renderer(folder, DataConfig(**data))
    (text,) = renderer.render([question])
    (ids,) = renderer.tokenize([text])
    assert ids.dtype == np.int32
    return text, [str(renderer.tokenizer.id_to_token(int(i))) for i in ids]


def test_template_with_bos_and_tokenizer_that_adds_bos_give_exactly_one(folder: Path) -> None:
    text, tokens = shown(folder)
    assert text == "<s>[user]1+1=</s>[assistant]"
    assert tokens == ["<s>", "[user]", "1", "+", "1", "=", "</s>", "[assistant]"]


def test_template_without_bos_gives_none(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "m", template=TEMPLATE.replace("{{ bos_token }}", ""))
    assert shown(tmp_path / "m")[1].count("<s>") == 0


def test_plain_adds_bos_only_where_the_tokenizer_would(tmp_path: Path) -> None:
    with_bos = write_tokenizer(tmp_path / "a", template=None)
    without = write_tokenizer(tmp_path / "b", template=None, adds_bos=False)
    assert shown(with_bos, template="plain") == ("<s>1+1=", ["<s>", "1", "+", "1", "="])
    assert shown(without, template="plain") == ("1+1=", ["1", "+", "1", "="])
    assert shown(with_bos, "<s>2", template="plain") == ("<s>2", ["<s>", "2"])


def test_two_bos_in_a_row_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="begins with two '<s>' tokens"):
        shown(folder, template="plain", prompt_format="<s><s>{prompt}")


def test_system_prompt_and_format_go_into_the_messages(folder: Path) -> None:
    text, _ = shown(folder, system_prompt="Be brief.", prompt_format=r"Q: {prompt} \boxed{}")
    assert text == r"<s>[system]Be brief.</s>[user]Q: 1+1= \boxed{}</s>[assistant]"


def test_no_chat_template_is_an_error_that_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no chat template; set data\.template to plain"):
        shown(write_tokenizer(tmp_path / "m", template=None))


def test_the_template_file_beside_the_tokenizer_is_found(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "m", template=None)
    (tmp_path / "m" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    assert shown(tmp_path / "m")[0] == "1+1=!"


def test_the_default_of_several_named_templates_is_used(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    write_tokenizer(tmp_path / "m", template=None, chat_template=named)
    assert shown(tmp_path / "m")[0] == "<s>[user]1+1=</s>[assistant]"


def test_a_template_that_refuses_is_a_config_error(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "m", template="{{ raise_exception('no system role') }}")
    with pytest.raises(ConfigError, match="chat template refused the prompt"):
        shown(tmp_path / "m")


def test_a_template_that_prints_the_date_prints_the_same_one_every_day(tmp_path: Path) -> None:
    template = (
        "{% if strftime_now is defined %}{% set day = strftime_now('%d %b %Y') %}{% endif %}\n"
        "Today: {{ day }}\n"
    )
    write_tokenizer(tmp_path / "m", template=template)
    assert shown(tmp_path / "m")[0] == "Today: 01 Jan 2026"


def test_truncation_and_padding_settings_of_the_file_are_ignored(folder: Path) -> None:
    _, tokens = shown(folder, "x" * 100)
    assert len(tokens) == 104 and tokens.count("x") == 100


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer"):
        shown(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot read .*tokenizer\.json"):
        shown(tmp_path)
    shutil.copy(write_tokenizer(tmp_path / "m") / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not valid JSON"):
        shown(tmp_path)


def test_ids_equal_those_of_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    theirs = AutoTokenizer.from_pretrained(folder)
    for question in ("1+1=", "Grüße, 東京 \U0001f600", " \n tabs\t"):
        messages = [{"role": "user", "content": question}]
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        renderer = Renderer(folder, DataConfig())
        (ids,) = renderer.tokenize(renderer.render([question]))
        assert ids.tolist() == expected


def test_nothing_here_imports_torch(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from llamarl_hpc.config.schema import DataConfig\n"
        "from llamarl_hpc.prompts import cursor, dataset, template\n"
        f"renderer = template.Renderer(Path({str(folder)!r}), DataConfig())\n"
        "assert len(renderer.tokenize(renderer.render(['1+1=']))[0]) == 8\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
