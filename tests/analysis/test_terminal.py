"""What the rollouts commands print: odd texts stay texts, narrow terminals lose nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from rich.console import Console
from synthetic_run import (
    Plan,
    begin_run,
    end_attempt,
    make_group,
    make_run,
    open_store,
    write_attempt,
)

from analysis.tokens import token_texts
from llamarl_hpc.cli.narrow import narrow_table
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.types import Status

SMALL = Plan(num_steps=4, prompts_per_step=2, num_generations=3, heldout=4, eval_steps=2)
REASON = "reward 'x' raised: [/b] \x1b[2J"  # rich would end a style that never began, and raise
REWARD = """
def odd(prompts, completions, **columns):
    if "7" in prompts[0]:
        raise ValueError("[/b] \\x1b[2J")
    return [1.0] * len(completions)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Of a folder [/x]; one group came back without completions."""
    made = begin_run(tmp_path / "[" / "x]", SMALL)
    write_attempt(made, SMALL, attempt=1, steps=range(4))
    store = open_store(made, 1)
    store.append(
        replace(
            make_group(SMALL, 1, 8, 4),
            status=Status.ABANDONED,
            reason=REASON,
            step=-1,
            staleness=-1,
            completions=[],
            rewards={},
            reward=[],
            advantage=[],
            logprobs_trainer=[],
        )
    )
    store.close()
    end_attempt(made, 1, "done")
    return made


def test_groups_without_completions_are_named_with_their_reason(run: RunDir, call: Any) -> None:
    shown = "reward 'x' raised: [/b] \u241b[2J"
    code, text, _ = call("rollouts", "show", run.path, "--status", "abandoned")
    assert code == 0 and "no completions: 1" in text and f"group 8: abandoned: {shown}" in text
    assert str(run.path) in text
    code, text, _ = call("rollouts", "verify", run.path)
    assert code == 0 and f"abandoned: {shown}" in text


def test_texts_with_brackets_and_control_characters_are_printed_as_they_are(
    run: RunDir, call: Any, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    words = ("--reward", f"{tmp_path / 'mine.py'}:odd")
    code, text, err = call("rollouts", "replay", run.path, *words)
    assert code == 0 and "[/b] \u241b[2J" in text, text + err
    (run.rollouts / "segment_000000.h5").write_bytes(b"nothing")
    for command in ("stats", "verify", "watch"):
        code, text, err = call("rollouts", command, run.path)
        assert "Traceback" not in err and "segment_000000.h5 cannot be opened" in text
    code, text, err = call("rollouts", "diff", run.path, run.path)
    assert code == 0 and f"A  {run.path}" in text


def test_a_diff_shows_questions_as_the_data_have_them(tmp_path: Path, call: Any) -> None:
    first = make_run(tmp_path / "a", SMALL)
    other = make_run(tmp_path / "b", Plan(num_steps=12, prompts_per_step=2, num_generations=3))
    code, text, _ = call("rollouts", "diff", first.path, other.path, "--json", tmp_path / "d.json")
    figures = json.loads((tmp_path / "d.json").read_text())["prompts"]
    named = [entry["question"] for entry in figures["better"] + figures["worse"]]
    assert code == 0 and named and all(f" {question} " in text for question in named)
    assert "<|im_start|>" not in text and all(q.startswith("What is ") for q in named)


def test_a_narrow_terminal_folds_and_cuts_nothing() -> None:
    table = narrow_table("means", ["step", "[/x]", "math_answer", "brevity"])
    table.add_row("10-14", "1234", "0.123456", "-0.987")
    console = Console(width=20)
    with console.capture() as printed:
        console.print(table)
    lines = printed.get().splitlines()
    assert max(map(len, lines)) <= 20 and "\u2026" not in printed.get()
    assert sorted("".join(lines).replace(" ", "")).count("x") == 1


def test_bytes_that_are_no_text_take_no_longer_the_more_there_are() -> None:
    class Broken:
        """A tokenizer whose every token is half a character."""

        longest = 0

        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            assert not skip_special_tokens
            self.longest = max(self.longest, len(ids))
            return "\ufffd" * len(ids)

    broken: Any = Broken()
    pieces = token_texts(broken, np.zeros(500, dtype=int).tolist())
    assert "".join(pieces) == "\ufffd" * 500 and broken.longest < 12


def test_at_40_columns_every_figure_is_there(
    tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_run(tmp_path / "r", SMALL)
    monkeypatch.setenv("COLUMNS", "40")
    code, text, _ = call("rollouts", "stats", made.path)
    assert code == 0 and "\u2026" not in text and max(map(len, text.splitlines())) <= 40
