"""Rows from files: what is read, and the file and line of everything that cannot be."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.prompts.files import read_rows
from llamarl_hpc.prompts.rows import Row

GOOD = '{"question": "1+1", "answer": "2"}\n'


def read(path: Path, prompt: Any = "question", answer: str | None = "answer") -> list[Row]:
    return read_rows(path, prompt=prompt, answer=answer)


def jsonl(folder: Path, text: str) -> Path:
    (folder / "d.jsonl").write_text(text)
    return folder / "d.jsonl"


def refusal(path: Path, **columns: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(path, **columns)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_row_keeps_all_its_columns_and_knows_its_line(tmp_path: Path) -> None:
    rows = read(jsonl(tmp_path, "\n" + GOOD + '{"question": " a ", "answer": 3.0, "level": 4}\n'))
    assert [row.question for row in rows] == ["1+1", "a"]
    assert rows[1].columns == {"question": " a ", "answer": 3.0, "level": 4}
    assert rows[1].where == f"{tmp_path}/d.jsonl line 3"


def test_several_columns_make_one_question(tmp_path: Path) -> None:
    path = jsonl(tmp_path, '{"Body": "Two cats.", "Question": "How many?", "Answer": 2.0}\n')
    (row,) = read(path, prompt=["Body", "Question"], answer="Answer")
    assert row.question == "Two cats. How many?"


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    message = refusal(jsonl(tmp_path, GOOD + GOOD + '{"question": "1+1", "answ\n' + GOOD))
    assert f"{tmp_path}/d.jsonl line 3: not valid JSON" in message


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1]", "line 1: wanted an object with columns"),
        (
            '{"questions": "x", "answer": 1}',
            "line 1: no column 'question'; it has questions, answer",
        ),
        ('{"questions": "x", "answer": 1}', "did you mean 'questions'?"),
        ('{"zzz": "x"}', "set data.prompt and data.answer"),
        ('{"question": "x", "nswer": 1}', "no column 'answer'; it has question, nswer; did you"),
        ('{"question": "  ", "answer": 1}', "column 'question' is empty"),
        ('{"question": [1], "answer": 1}', "column 'question' wanted text, found list"),
        ('{"question": "x", "answer": null}', "column 'answer' is empty"),
        ('{"question": "x", "answer": " "}', "column 'answer' is empty"),
        ('{"question": "x", "answer": NaN}', "column 'answer' is empty"),
        ('{"question": "\\ud83d x", "answer": 1}', "line 1: half a character"),
        ('{"question": "x", "answer": 1, "other": ["\\uDE00"]}', "line 1: half a character"),
        ('{"question": "x", "answer": 1, "id": 99999999999999999999}', "column 'id' has a number"),
        ("[" * 100_000, "line 1: nested too deeply"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused(tmp_path: Path, line: str, said: str) -> None:
    assert said in refusal(jsonl(tmp_path, line + "\n"))


def test_a_row_without_the_column_is_named_even_if_others_have_it(tmp_path: Path) -> None:
    assert "d.jsonl line 2: no column 'answer'" in refusal(
        jsonl(tmp_path, GOOD + '{"question": "x"}\n')
    )


def test_no_answer_is_needed_where_no_reward_asks_for_one(tmp_path: Path) -> None:
    assert len(read(jsonl(tmp_path, '{"question": "x"}\n'), answer=None)) == 1


def test_files_without_rows_or_of_unknown_form_are_refused(tmp_path: Path) -> None:
    assert "has no rows" in refusal(jsonl(tmp_path, ""))
    assert "has no rows" in refusal(jsonl(tmp_path, "\n\n"))
    (tmp_path / "d.csv").write_text("a,b\n")
    assert "cannot tell the form of a '.csv' file" in refusal(tmp_path / "d.csv")
    (tmp_path / "l.jsonl").write_bytes(GOOD.encode() + b'{"question": "\xff"}\n')
    assert f"{tmp_path}/l.jsonl line 2: not UTF-8" in refusal(tmp_path / "l.jsonl")
    assert f"did you mean '{tmp_path}/d.jsonl'?" in refusal(tmp_path / "dd.jsonl")


def test_times_of_a_parquet_file_are_plain(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    day = datetime(2026, 3, 1, 12)
    table = pyarrow.table(
        {
            "question": ["x"],
            "answer": ["1"],
            "when": pyarrow.array([day], pyarrow.timestamp("ns")),
            "took": pyarrow.array([timedelta(seconds=1)], pyarrow.duration("ns")),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    (row,) = read(tmp_path / "d.parquet")
    assert type(row.columns["when"]) is datetime and row.columns["when"] == day
    assert type(row.columns["took"]) is timedelta

    nested = pyarrow.array([[day]], pyarrow.list_(pyarrow.timestamp("ns")))
    table = table.append_column("visits", nested)
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    assert "d.parquet row 1: column 'visits' cannot reach" in refusal(tmp_path / "d.parquet")


def test_parquet_and_saved_data_sets_give_the_same_rows(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    columns = {"question": ["1+1", "2+2", "3+3"], "answer": ["2", "4", "6"]}
    table = pyarrow.table(columns)
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    saved = tmp_path / "saved" / "train"
    saved.mkdir(parents=True)
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (table.slice(0, 2), table.slice(2)), strict=True):
        with pyarrow.ipc.new_stream(saved / name, table.schema) as stream:
            stream.write_table(part)
    state = {"_data_files": [{"filename": name} for name in names]}
    (saved / "state.json").write_text(json.dumps(state))
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (tmp_path / "hub").mkdir()
    (tmp_path / "d.parquet").rename(tmp_path / "hub" / "train-0.parquet")
    for path in (tmp_path / "hub" / "train-0.parquet", tmp_path / "saved", saved, tmp_path / "hub"):
        rows = read(path)
        assert [row.question for row in rows] == columns["question"]
        assert [row.columns["answer"] for row in rows] == columns["answer"]
        assert rows[2].where.endswith("row 3")


def test_folders_and_parquet_files_that_hold_no_data_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    assert "without a saved data set" in refusal(tmp_path)
    (tmp_path / "x.parquet").write_text("no")
    assert "x.parquet is not a readable parquet file" in refusal(tmp_path / "x.parquet")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["a", "b"]}')
    assert "has the splits a, b" in refusal(tmp_path)
