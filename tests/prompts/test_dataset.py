"""Training and held-out prompts: sizes, separation, what is left out and how that is told."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from llamarl_hpc.config.schema import Config
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.prompts.dataset import PromptSet, PromptSets, load_prompts

ONE = {  # 100 distinct questions
    "name": "products",
    "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}
TWO = {
    "name": "chain_sum",
    "params": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
}


def load(folder: Path, data: dict[str, Any], **blocks: Any) -> PromptSets:
    return load_prompts(Config.model_validate({"data": data, **blocks}), folder)


def texts(prompts: PromptSet) -> list[str]:
    return [prompts[i].text for i in range(len(prompts))]


def numbered(folder: Path, numbers: range | list[int], name: str = "d.jsonl") -> str:
    lines = [json.dumps({"question": f"say {i}", "answer": str(i)}) for i in numbers]
    (folder / name).write_text("\n".join(lines))
    return str(folder / name)


# ------------------------------------------------------------------ files


def test_rows_are_held_out_by_content_whatever_their_order(folder: Path, tmp_path: Path) -> None:
    numbers = list(range(100))
    first = load(folder, {"path": numbered(tmp_path, numbers)}, evaluation={"num_prompts": 20})
    random.Random(0).shuffle(numbers)
    second = load(folder, {"path": numbered(tmp_path, numbers)}, evaluation={"num_prompts": 20})
    assert len(first.train) == 80 and len(first.heldout) == 20
    assert texts(first.heldout) == texts(second.heldout)
    assert set(texts(first.train)) == set(texts(second.train))
    assert not set(texts(first.train)) & set(texts(first.heldout))
    assert first.train.fingerprint != second.train.fingerprint  # same prompts, other order


def test_all_repeats_of_a_heldout_question_leave_training(folder: Path, tmp_path: Path) -> None:
    path = numbered(tmp_path, list(range(10)) * 3)
    sets = load(folder, {"path": path}, evaluation={"num_prompts": 4})
    assert (len(sets.train), len(sets.heldout)) == (18, 4)
    assert sets.train.num_distinct == 6


def test_at_least_half_of_the_questions_stay_in_training(folder: Path, tmp_path: Path) -> None:
    sets = load(folder, {"path": numbered(tmp_path, range(9))}, evaluation={"num_prompts": 100})
    assert (len(sets.train), len(sets.heldout)) == (5, 4)
    assert sets.skipped.sentences() == [
        "5 training prompts (5 distinct), 4 held-out prompts",
        "evaluation.num_prompts is 100, but only 4 questions could be held out",
    ]


def test_a_single_question_cannot_be_held_out(folder: Path, tmp_path: Path) -> None:
    path = numbered(tmp_path, [7])
    with pytest.raises(ConfigError, match="the data have only one distinct question"):
        load(folder, {"path": path})
    sets = load(folder, {"path": path}, evaluation={"num_prompts": 0})
    assert (len(sets.train), len(sets.heldout)) == (1, 0)


def test_questions_of_the_heldout_file_leave_training(folder: Path, tmp_path: Path) -> None:
    data = {
        "path": numbered(tmp_path, range(50)),
        "eval_path": numbered(tmp_path, range(40, 60), "e.jsonl"),
    }
    sets = load(folder, data, evaluation={"num_prompts": 5})
    assert (len(sets.train), len(sets.heldout)) == (40, 5)
    assert sets.skipped.num_also_heldout == 10
    assert "10 training rows left out: data.eval_path asks them too" in sets.skipped.sentences()
    with pytest.raises(ConfigError, match=r"every question of .* is also in data\.eval_path"):
        load(folder, data | {"eval_path": data["path"]})


def test_prompts_that_are_too_long_are_left_out_and_reported(folder: Path, tmp_path: Path) -> None:
    # the template costs 4 tokens, each letter 1
    lengths = [10, 32, 40, 63, 64, 200]
    lines = [json.dumps({"question": "x" * (n - 4), "answer": "1"}) for n in lengths]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    data = {"path": str(tmp_path / "d.jsonl")}
    sets = load(folder, data, rollout={"max_prompt_length": 40}, evaluation={"num_prompts": 0})
    assert [len(sets.train[i].token_ids) for i in range(3)] == [10, 32, 40]
    assert sets.skipped.num_too_long == 3
    assert sets.skipped.too_long == [
        f"{tmp_path}/d.jsonl line {line}: {n} tokens" for line, n in ((4, 63), (5, 64), (6, 200))
    ]
    assert (
        "3 of 6 prompts left out: longer than rollout.max_prompt_length 40"
        in (sets.skipped.sentences()[1])
    )
    with pytest.raises(ConfigError, match=r"all 6 training prompts are longer .* has 10 tokens"):
        load(folder, data, rollout={"max_prompt_length": 9})


def test_only_the_math_reward_needs_an_answer_column(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"question": "a"}\n{"question": "b"}\n')
    data = {"path": str(tmp_path / "d.jsonl")}
    with pytest.raises(ConfigError, match="line 1: no column 'answer'"):
        load(folder, data)
    sets = load(folder, data, rewards=[{"kind": "python", "function": "m:f"}])
    assert len(sets.train) == 1


# ------------------------------------------------------------------ ids


def test_an_id_is_of_text_and_answer_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    rows = [
        {"question": "a", "answer": "1"},
        {"question": "a", "answer": "1", "level": 3},
        {"question": "a", "answer": "2"},
        {"question": "b", "answer": "1"},
    ]
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    data = {"path": str(tmp_path / "d.jsonl")}
    train = load(folder, data, evaluation={"num_prompts": 0}).train
    ids = [train[i].prompt_id for i in range(4)]
    assert ids[0] == ids[1] and len(set(ids)) == 3
    assert train[1].columns == rows[1]


def test_the_fingerprint_is_of_the_ordered_ids(folder: Path, tmp_path: Path) -> None:
    data = {"path": numbered(tmp_path, range(6))}
    train = load(folder, data, evaluation={"num_prompts": 0}).train
    prompts = [train[i] for i in range(6)]
    assert PromptSet(prompts).fingerprint == train.fingerprint
    assert PromptSet(prompts[::-1]).fingerprint != train.fingerprint
    assert PromptSet(prompts[:-1]).fingerprint != train.fingerprint


# ------------------------------------------------------------------ generated tasks


def test_generated_questions_are_fixed_by_their_seed(folder: Path) -> None:
    data = {"tasks": [ONE, TWO], "size": 200, "seed": 3}
    first, second = load(folder, data), load(folder, data)
    assert first.train.fingerprint == second.train.fingerprint
    assert first.heldout.fingerprint == second.heldout.fingerprint
    assert load(folder, data | {"seed": 4}).train.fingerprint != first.train.fingerprint


def test_no_heldout_question_is_asked_in_training(folder: Path) -> None:
    sets = load(folder, {"tasks": [ONE, TWO], "size": 2000})
    assert (len(sets.train), len(sets.heldout)) == (2000, 128)
    assert sets.heldout.num_distinct == 128
    assert not set(texts(sets.train)) & set(texts(sets.heldout))


def test_a_tiny_task_keeps_half_of_its_questions_for_training(folder: Path) -> None:
    sets = load(folder, {"tasks": [ONE], "size": 1000})
    assert len(sets.train) == 1000
    assert (sets.train.num_distinct, len(sets.heldout)) == (50, 50)
    assert "only 50 questions could be held out" in sets.skipped.sentences()[-1]


def test_tasks_are_mixed_by_weight(folder: Path) -> None:
    data = {"tasks": [ONE | {"weight": 3.0}, TWO], "size": 2000}
    train = load(folder, data).train
    products = sum(train[i].columns["task"] == "products" for i in range(2000))
    assert 1440 < products < 1560


def test_a_generated_row_has_the_columns_that_the_config_names(folder: Path) -> None:
    data = {"tasks": [ONE], "size": 10, "prompt": "input", "answer": "target"}
    columns = load(folder, data).train[0].columns
    assert set(columns) == {"input", "target", "task", "metadata"}
    a, b = columns["metadata"]["expression"].split(" * ")
    assert int(columns["target"]) == int(a) * int(b)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"name": "chain_sums"}, r"data\.tasks\.0\.name: no task 'chain_sums'; there is chain_sum"),
        ({"name": "chain_sum", "params": {"max_digit": 1}}, "unexpected keyword argument"),
        ({"name": "chain_sum", "params": {"min_terms": 0}}, "min_terms must be positive"),
    ],
)
def test_an_unknown_task_or_parameter_is_refused(
    folder: Path, task: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        load(folder, {"tasks": [task]})


def test_thousands_of_prompts_load_within_seconds(folder: Path) -> None:
    load(folder, {"tasks": [TWO], "size": 8})  # imports
    start = time.perf_counter()
    sets = load(folder, {"tasks": [TWO], "size": 4096})
    assert len(sets.train) == 4096
    assert time.perf_counter() - start < 10.0  # about 1 s on an idle core
