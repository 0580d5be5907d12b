"""Which rollouts are meant: by prompt and by reward, in Python and on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from synthetic_run import Plan, begin_run, make_group, make_run, write_attempt

from analysis.read_run import Run
from llamarl_hpc.notebook import Run as NotebookRun
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.storage.rollout_store.file import RolloutFile

SMALL = Plan(num_steps=5, prompts_per_step=3, num_generations=4, heldout=6, eval_steps=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_run(tmp_path_factory.mktemp("filters") / "r1", SMALL)


def test_a_prompt_is_found_by_its_id_or_how_that_begins(folder: RunDir) -> None:
    run = Run(folder)
    wanted = make_group(SMALL, 1, 7, 2).prompt.prompt_id
    assert set(run.rollouts(prompt=wanted)["group_id"]) == {7}
    assert len(run.groups(prompt=wanted, purpose="train")) == 1
    begun = run.rollouts(prompt=wanted[:-1], purpose="train")  # ids differ in the last digit
    assert set(begun["group_id"]) == set(range(15))
    assert run.rollouts(prompt="none").empty
    assert NotebookRun(folder).rollouts(prompt=wanted)["prompt_id"].unique().tolist() == [wanted]


def test_rewards_between_two_numbers_both_included(folder: RunDir) -> None:
    run = Run(folder)
    everything = run.rollouts(purpose="train", text=True)
    least, most = everything["reward"].quantile([0.25, 0.75], interpolation="nearest")
    expected = everything[everything["reward"].between(least, most)].reset_index(drop=True)
    found = run.rollouts(purpose="train", reward=(least, most), text=True)
    pd.testing.assert_frame_equal(found, expected)
    arrow = run.to_arrow(purpose="train", reward=(least, most), tokens=True)
    assert arrow["rollout_id"].to_pylist() == expected["rollout_id"].tolist()
    assert arrow["completion"].to_pylist() == expected["completion"].tolist()
    assert (
        arrow["token_ids"].to_pylist()[3] == run.rollout(found["rollout_id"][3]).token_ids.tolist()
    )
    assert len(NotebookRun(folder).rollouts(reward=(least, most))) == len(expected)


def test_every_command_that_lists_rollouts_takes_them(
    folder: RunDir, call: Any, tmp_path: Path
) -> None:
    run = Run(folder)
    prompt = make_group(SMALL, 1, 4, 1).prompt.prompt_id
    paid = run.rollouts(prompt=prompt, reward=(0.5, 9.0))["rollout_id"].tolist()
    words = (folder.path, "--prompt", prompt, "--min-reward", "0.5")
    assert 0 < len(paid) < 4
    code, text, _ = call("rollouts", "show", *words)
    assert code == 0 and [f"rollout {number} " in text for number in paid] == [True] * len(paid)
    assert text.count("rollout ") == len(paid) and f"prompt {prompt}" in text
    code, text, _ = call("rollouts", "grep", ".", *words, "--max-reward", "9")
    assert code == 0 and f"{len(paid)} of {len(paid)} rollouts match" in text
    out = tmp_path / "r.parquet"
    code, text, _ = call("rollouts", "export", *words, "--to", "parquet", "--out", out)
    assert code == 0 and pd.read_parquet(out)["rollout_id"].tolist() == paid


def test_a_table_that_nothing_fits_has_its_columns_all_the_same(
    folder: RunDir, call: Any, tmp_path: Path
) -> None:
    run, out = Run(folder), tmp_path / "r.parquet"
    everything = run.to_arrow(tokens=True)
    nothing = run.to_arrow(tokens=True, status="dropped")
    assert nothing.schema == everything.schema and nothing.num_rows == 0
    assert pa.concat_tables([nothing, everything]).num_rows == everything.num_rows
    code, text, _ = call(
        *("rollouts", "export", folder.path, "--to", "parquet", "--out", out, "--tokens"),
        *("--status", "dropped"),
    )
    assert code == 0 and text.startswith("0 rollouts of ")
    assert list(pd.read_parquet(out).columns) == everything.column_names


def test_texts_are_read_from_the_files_that_hold_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = begin_run(tmp_path / "r2", SMALL)
    for attempt, steps in ((1, range(3)), (2, range(3, 5))):
        write_attempt(made, SMALL, attempt=attempt, steps=steps)  # a segment each
    run, read = Run(made), list[str]()
    plain = RolloutFile.texts

    def noted(file: RolloutFile, column: str, flat: str, rows: Any) -> list[str]:
        read.append(file.name)
        return plain(file, column, flat, rows)

    monkeypatch.setattr(RolloutFile, "texts", noted)
    late = run.rollouts(steps=(4, 4), purpose="train", text=True)
    records = [make_group(SMALL, 2, 12 + i, 4) for i in range(3)]
    assert late["completion"].tolist() == [c.text for r in records for c in r.completions]
    assert set(late["prompt"]) == {r.prompt.text for r in records}
    assert set(read) == {"segment_000001.h5"}
    read.clear()
    assert run.rollouts(text=True)["completion"].str.len().min() > 5
    assert set(read) == {"segment_000000.h5", "segment_000001.h5"}
