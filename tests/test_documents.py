"""The documents say what is there: links, commands, keys, files, and examples that run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from llamarl_hpc.cli.main import app
from llamarl_hpc.config.fields import ENTRY, ITEM, find, keys_of
from llamarl_hpc.config.load import load_config
from llamarl_hpc.config.schema import Config
from llamarl_hpc.launch import local
from llamarl_hpc.rewards.math_answer import score
from llamarl_hpc.rewards.python_function import PythonFunction

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / "experiments" / name for name in ("README.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
FILE_ENDINGS = (".py", ".json", ".jsonl", ".yaml", ".md", ".h5", ".log", ".html", ".txt")

each_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix()
)


# ------------------------------------------------------------------ reading Markdown


def blocks(page: Path, language: str | None = None) -> list[str]:
    """Contents of the fenced blocks, of one language or of all."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for name, text in found if language is None or name == language]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def spans(page: Path) -> list[str]:
    """Contents of all `inline code`."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page))


def links(page: Path) -> list[str]:
    """Targets of links and pictures that lead to files of this project."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return [target for target in targets if "://" not in target]


def anchors(page: Path) -> set[str]:
    """What a heading is called in a link, as the usual hosts make it."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def command_lines(page: Path) -> Iterator[list[str]]:
    """Words after `llamarl-hpc` in blocks and inline code, comments and optional parts undone."""
    text = "\n".join(blocks(page)).replace("\\\n", " ")
    for line in [*text.splitlines(), *spans(page)]:
        plain = re.sub(r"^#\s*", "", line.strip())
        if plain.startswith("llamarl-hpc "):
            yield shlex.split(re.sub(r"[\[\]](?=\s|--|$)|\s\[", " ", plain), comments=True)[1:]


# ------------------------------------------------------------------ links and files


@each_page
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@each_page
def test_every_file_of_the_project_that_is_named_exists(page: Path) -> None:
    """By its path, or by its path within the package."""
    places = ("llamarl_hpc/", "analysis/", "experiments/", "docs/", "tests/", ".ci/")
    named = [s for s in spans(page) if s.startswith(places) or re.fullmatch(r"\w+/[\w/]+\.py", s)]
    roots = (ROOT, ROOT / "llamarl_hpc")
    assert [name for name in named if not any((root / name).exists() for root in roots)] == []


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    listed = {(index.parent / link).resolve() for link in links(index)}
    assert [page.name for page in PAGES if page not in listed | {index}] == []


def test_the_readme_lists_every_folder_of_the_package() -> None:
    (tree,) = (block for block in blocks(ROOT / "README.md") if "run_dir.py" in block)
    described = re.findall(r"^\s*([\w/]+)/\s+\S", tree, re.MULTILINE)
    folders = [path.parent for path in (ROOT / "llamarl_hpc").rglob("__init__.py")]
    assert sorted(folder.name for folder in folders if folder.name not in described) == []
    assert [name for name in described if not any(ROOT.rglob(f"{name}/"))] == []


@each_page
def test_every_make_target_exists(page: Path) -> None:
    text = "\n".join([*spans(page), *blocks(page)])
    named = set(re.findall(r"^\s*make ([\w-]+)", text, re.MULTILINE))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named - targets == set()


# ------------------------------------------------------------------ commands


@cache
def commands() -> dict[str, set[str]]:
    """Name ("rollouts show") -> its options."""
    found: dict[str, set[str]] = {}

    def walk(command: Any, name: str) -> None:
        if hasattr(command, "commands"):
            for part, inner in command.commands.items():
                walk(inner, f"{name} {part}".strip())
        else:
            found[name] = {o for parameter in command.params for o in parameter.opts} | {"--help"}

    walk(typer.main.get_command(app), "")
    return found


def command_of(words: Sequence[str]) -> str:
    two = " ".join(words[:2])
    return two if two in commands() else words[0]


@each_page
def test_every_command_and_option_exists(page: Path) -> None:
    wrong = []
    for words in command_lines(page):
        command = command_of(words)
        known = commands().get(command, set())
        if not known:
            wrong.append(command)
        wrong += [f"{command} {word}" for word in words if word[:2] == "--" and word not in known]
    assert wrong == []


def test_the_readme_has_every_command() -> None:
    named = {command_of(words) for words in command_lines(ROOT / "README.md")}
    assert set(commands()) - named == set()


@each_page
def test_every_config_and_override_in_a_command_is_valid(page: Path) -> None:
    for words in command_lines(page):
        configs = [ROOT / word for word in words if word.startswith("experiments/")]
        overrides = [b for a, b in pairwise(words) if a == "--set" and "=" in b]
        overrides = [text for text in overrides if text != "KEY=VALUE"]
        for config in configs:
            load_config(config, overrides)  # raises what a user would read


# ------------------------------------------------------------------ keys


@each_page
def test_every_key_that_is_named_exists(page: Path) -> None:
    wrong = []
    for span in spans(page):
        name, _, _ = span.partition(":")
        if re.fullmatch(r"[a-z_]+(\.[A-Za-z_0-9]+)+", name) and name.split(".")[0] in keys_of(""):
            is_executor = re.fullmatch(r"generator\.\d+", name)
            parts = [
                0 if part == ITEM else "X" if part == ENTRY else part for part in name.split(".")
            ]
            place = [int(part) if str(part).isdigit() else part for part in parts]
            if not is_executor and not name.endswith(FILE_ENDINGS) and find(place) is None:
                wrong.append(span)
    assert wrong == []


@each_page
def test_every_yaml_example_is_a_valid_configuration(page: Path) -> None:
    for block in blocks(page, "yaml"):
        Config.model_validate(yaml.safe_load(block))


def test_the_keys_that_a_resume_may_change_are_all_documented() -> None:
    text = (ROOT / "docs" / "running.md").read_text()
    section = text[text.index("## Resume") : text.index("## Watch")]
    keys = [key.rstrip(".") for key in local.CHANGEABLE_KEYS]
    assert [key for key in keys if f"`{key}`" not in section] == []
    assert set(re.findall(r"`([a-z_]+\.[a-z_]+)`", section)) <= set(keys)


# ------------------------------------------------------------------ examples


def test_the_table_of_scores_is_true() -> None:
    text = (ROOT / "docs" / "rewards.md").read_text()
    rows = re.findall(r"^\| `(.*?)` \| `(.*?)` \| ([01]) \|$", text, re.MULTILINE)
    assert len(rows) > 10
    assert [row for row in rows if score(row[1], row[0]) != float(row[2])] == []


def test_the_reward_function_of_the_document_works(tmp_path: Path) -> None:
    (source,) = blocks(ROOT / "docs" / "rewards.md", "python")
    (tmp_path / "mine.py").write_text(source)
    function = PythonFunction(f"{tmp_path / 'mine.py'}:short")
    completions = ["19", "x" * 41, "19"]
    columns: dict[str, Any] = {"answer": ["19"] * 3, "long": [False, False, True]}
    assert function(["q"] * 3, completions, **columns) == [1.0, 0.0, None]


@each_page
def test_pages_are_ascii_and_not_wider_than_the_code(page: Path) -> None:
    lines = page.read_text().splitlines()
    wide = [line for line in lines if len(line) > 104 and "|" not in line and "](" not in line]
    assert wide == []
    assert [line for line in lines if not line.isascii()] == []
