"""rollouts grep, export, diff, repair and verify through the command line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
from filelock import FileLock
from synthetic_run import Plan, begin_attempt, begin_run, make_run, write_attempt

from analysis.diff import compare_steps
from analysis.read_run import Run
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.storage.rollout_store import encode
from llamarl_hpc.storage.rollout_store.file import RolloutFile

SMALL = Plan(num_steps=6, prompts_per_step=2, num_generations=3, heldout=8, eval_steps=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_run(tmp_path_factory.mktemp("runs") / "r1", SMALL)


def copy_of(folder: RunDir, path: Path) -> RunDir:
    shutil.copytree(folder.path, path)
    return RunDir(path)


def segment(run: RunDir, number: int = 0) -> Path:
    return run.rollouts / f"segment_{number:06d}.h5"


# ---------------------------------------------------------------- grep


def test_grep_finds_what_pandas_finds(folder: RunDir, call: Any, tmp_path: Path) -> None:
    frame = Run(folder).rollouts(purpose="train", text=True)
    pattern = frame["completion"][0][:6].strip().split()[0]
    wanted = frame[frame["completion"].str.contains(pattern, regex=False)]
    out = tmp_path / "m.json"
    words = ("rollouts", "grep", pattern, folder.path, "--purpose", "train", "--json", out)
    code, text, _ = call(*words)
    assert code == 0 and f"{len(wanted)} of {len(frame)} rollouts match" in text
    shown = json.loads(out.read_text())["shown"]
    assert [m["rollout_id"] for m in shown] == wanted["rollout_id"].tolist()[:50]
    assert all(m["match"] == pattern for m in shown)
    assert [m["reward"] for m in shown] == wanted["reward"].tolist()[:50]


def test_grep_looks_in_prompts_and_says_when_nothing_matches(folder: RunDir, call: Any) -> None:
    code, text, _ = call("rollouts", "grep", "what IS", folder.path, "-i", "--in", "prompt")
    assert code == 0 and "60 of 60 rollouts match" in text
    code, text, _ = call("rollouts", "grep", "no such text", folder.path)
    assert code == 1 and "0 of 60 rollouts match" in text


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("(", "--in", "prompt"), "'(' is not a regular expression"),
        (("x", "--in", "answer"), "--in is one of completion, prompt, both; got 'answer'"),
        (("x", "--status", "lost"), "status is one of trained"),
    ],
)
def test_a_wrong_search_is_one_sentence(
    folder: RunDir, call: Any, words: tuple[str, ...], part: str
) -> None:
    code, _, error = call("rollouts", "grep", words[0], folder.path, *words[1:])
    assert code == 2 and part in error and error.count("\n") == 1


# ---------------------------------------------------------------- export


def test_parquet_holds_what_pandas_holds(folder: RunDir, call: Any, tmp_path: Path) -> None:
    out = tmp_path / "new" / "r.parquet"
    words = ("rollouts", "export", folder.path, "--to", "parquet", "--out", out, "--tokens")
    code, text, _ = call(*words, "--purpose", "train", "--first-step", "2", "--last-step", "3")
    assert code == 0 and text.startswith("12 rollouts of ")
    run = Run(folder)
    frame, written = run.rollouts(purpose="train", steps=(2, 3), text=True), pd.read_parquet(out)
    for name in ("rollout_id", "reward", "rewards/brevity", "prompt", "completion", "prompt_id"):
        assert written[name].tolist() == frame[name].tolist(), name
    assert written["status"].tolist() == ["trained"] * 12
    rollout = run.rollout(int(written["rollout_id"][5]))
    assert written["token_ids"][5].tolist() == rollout.token_ids.tolist()
    np.testing.assert_array_equal(written["logprob_trainer"][5], rollout.logprob_trainer)
    assert written["loss_mask"][5].dtype == bool
    assert sorted(os.listdir(out.parent)) == ["r.parquet"]


def test_json_lines_are_strict_json_with_null_for_unknown(
    folder: RunDir, call: Any, tmp_path: Path
) -> None:
    out = tmp_path / "r.jsonl"
    code, _, _ = call("rollouts", "export", folder.path, "--to", "jsonl", "--out", out)
    assert code == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    run = Run(folder)
    assert [row["rollout_id"] for row in rows] == run.rollouts()["rollout_id"].tolist()
    evaluated = [row for row in rows if row["purpose"] == "eval"]
    assert evaluated and all(row["rewards/brevity"] is None for row in evaluated)
    assert rows[0]["columns"] == run.rollout(rows[0]["rollout_id"]).columns


def test_a_wrong_kind_or_place_is_one_sentence(folder: RunDir, call: Any, tmp_path: Path) -> None:
    code, _, error = call("rollouts", "export", folder.path, "--to", "csv", "--out", tmp_path / "x")
    assert code == 2 and "--to is one of parquet, jsonl; got 'csv'" in error
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "x"
    code, _, error = call("rollouts", "export", folder.path, "--to", "jsonl", "--out", out)
    assert code == 2 and "choose another --out" in error and error.count("\n") == 1


def test_arrow_pandas_and_polars_have_the_same_rows(folder: RunDir) -> None:
    run = Run(folder)
    table = run.to_arrow(purpose="train", tokens=True)
    assert table["reward"].to_pylist() == run.to_pandas(purpose="train")["reward"].tolist()
    try:
        import polars  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match="needs polars"):
            run.to_polars()
    else:
        assert run.to_polars()["rollout_id"].to_list() == run.rollouts()["rollout_id"].tolist()


def test_of_a_run_without_rollouts_nothing_is_exported_and_nothing_breaks(
    call: Any, tmp_path: Path
) -> None:
    run, out = begin_run(tmp_path / "r", SMALL), tmp_path / "r.parquet"
    assert call("rollouts", "export", run.path, "--to", "parquet", "--out", out)[0] == 0
    assert len(pd.read_parquet(out)) == 0
    assert call("rollouts", "grep", "x", run.path)[0] == 1
    assert call("rollouts", "diff", run.path, run.path)[0] == 0


# ---------------------------------------------------------------- diff


def test_a_run_does_not_differ_from_its_copy(folder: RunDir, call: Any, tmp_path: Path) -> None:
    copy = copy_of(folder, tmp_path / "copy")
    code, text, _ = call("rollouts", "diff", folder.path, copy.path)
    assert code == 0 and "the 6 steps that are in both trained the same tokens" in text
    assert "equal" in text


def test_a_diff_names_the_key_the_step_and_the_outcome(
    folder: RunDir, call: Any, tmp_path: Path
) -> None:
    other = make_run(tmp_path / "other", Plan(**{**vars(SMALL), "max_staleness": 2}))
    out = tmp_path / "d.json"
    code, text, _ = call("rollouts", "diff", folder.path, other.path, "--json", out)
    figures = json.loads(out.read_text())
    assert code == 0 and "algorithm.max_staleness" in text
    assert figures["config"] == {"algorithm.max_staleness": [1, 2]}
    assert figures["outcome"]["rollouts trained"] == [36, 36]
    rewards = [Run(r).rollouts(purpose="train")["reward"].mean() for r in (folder, other)]
    assert figures["outcome"]["reward"] == pytest.approx(rewards)
    steps = figures["steps"]
    assert steps == compare_steps(Run(folder), Run(other)) and steps["in_both"] == 6
    assert [e["policy_version"] for e in figures["evaluations"]] == [0, 3, 6]


def test_the_last_quarter_of_one_step_is_that_step(
    folder: RunDir, call: Any, tmp_path: Path
) -> None:
    one = make_run(tmp_path / "one", Plan(**{**vars(SMALL), "num_steps": 1}))
    out = tmp_path / "d.json"
    assert call("rollouts", "diff", one.path, folder.path, "--json", out)[0] == 0
    outcome = json.loads(out.read_text())["outcome"]
    assert outcome["steps"] == [1, 6]
    first, last = outcome["reward, last quarter"]
    assert first == pytest.approx(outcome["reward"][0])
    rows = Run(folder).rollouts(purpose="train", steps=(4, 5))
    assert last == pytest.approx(rows["reward"].mean())


# ---------------------------------------------------------------- verify and repair


def flip(path: Path, column: str) -> None:
    """One bit in the middle of a contiguous column, or of the first chunk."""
    with h5py.File(path, "r", locking=False) as file:
        dataset = file[column].id
        if file[column].chunks:
            chunk = dataset.get_chunk_info(0)
            at = chunk.byte_offset + chunk.size // 2
        else:
            at = dataset.get_offset() + file[column].nbytes // 2
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def test_verify_names_file_and_column_of_a_flipped_bit(
    folder: RunDir, call: Any, tmp_path: Path
) -> None:
    run = copy_of(folder, tmp_path / "r")
    flip(segment(run), "rollouts/reward")
    code, text, error = call("rollouts", "verify", run.path)
    assert code == 1 and error == ""
    assert "rollouts/reward of segment_000000.h5 cannot be read: its checksum is wrong" in text


@pytest.mark.parametrize("name", ["table_rows", "first_rollout_id"])
def test_a_malformed_attribute_is_reported_by_every_command_without_a_traceback(
    folder: RunDir, call: Any, tmp_path: Path, name: str
) -> None:
    run = copy_of(folder, tmp_path / "r")
    with h5py.File(segment(run), "r+", locking=False) as file:
        file.attrs[name] = b"nonsense"
    for words in (("stats", run.path), ("show", run.path), ("verify", run.path)):
        code, text, error = call("rollouts", *words)
        assert code in (0, 1) and "Traceback" not in text + error
        assert f"segment_000000.h5 is damaged: its attribute {name} is 'nonsense'" in " ".join(
            (text + error).split()
        )
    assert call("rollouts", "verify", run.path)[0] == 1


def test_a_damaged_file_is_left_out_and_said(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "CONTIGUOUS_BYTES", 64)  # chunks, which HDF5 checks by itself
    run = make_run(tmp_path / "r", SMALL)
    flip(segment(run), "text/utf8")
    code, text, _ = call("rollouts", "grep", "a", run.path)
    assert code == 1 and "0 of 0 rollouts match" in text
    assert "left out: text/utf8 of segment_000000.h5 cannot be read" in text
    assert "; 60 rollouts are missing" in text
    assert f"what can be saved: llamarl-hpc rollouts repair {run.path}" in text


def test_every_command_goes_on_without_a_damaged_segment(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "CONTIGUOUS_BYTES", 64)
    monkeypatch.setattr("llamarl_hpc.storage.rollout_store.segment.MAX_PARTS", 2)
    run = make_run(tmp_path / "r", SMALL)  # three segments of two steps
    sound = Run(run).rollouts()
    flip(segment(run, 1), "rewards/brevity")
    flip(segment(run, 1), "text/utf8")
    left = Run.open(run.path)
    frame = left.rollouts(purpose="train")
    assert sorted(frame["step"].unique()) == [0, 1, 4, 5]
    wanted = sound[(sound["purpose"] == "train") & ~sound["step"].isin([2, 3])]
    assert frame["rollout_id"].tolist() == wanted["rollout_id"].tolist()
    assert frame["rewards/brevity"].tolist() == wanted["rewards/brevity"].tolist()
    (problem,) = left.store.problems
    assert "rewards/brevity of segment_000001.h5 cannot be read" in problem
    missing = len(sound) - len(Run.open(run.path).rollouts())
    assert problem.endswith(f"; {missing} rollouts are missing")
    for words in (
        ("rollouts", "stats", run.path),
        ("rollouts", "show", run.path, "--limit", "1"),
        ("rollouts", "watch", run.path),
        ("rollouts", "grep", "sum", run.path),
        ("rollouts", "export", run.path, "--to", "jsonl", "--out", tmp_path / "x.jsonl"),
        ("rollouts", "diff", run.path, run.path),
    ):
        code, text, error = call(*words)
        assert code == 0, (words, text, error)
        said = "show" not in words  # which reads nothing of it
        assert ("segment_000001.h5 cannot be read" in text + error) == said, words
    assert len((tmp_path / "x.jsonl").read_text().splitlines()) == len(sound) - missing
    code, text, _ = call("report", run.path)
    assert code == 0 and "segment_000001.h5 cannot be read" in run.report.read_text()
    code, text, _ = call("rollouts", "repair", run.path)
    assert code == 0 and "1 of 3 files are damaged" in text
    saved = Run.open(tmp_path / "r-repaired")
    assert len(saved.rollouts()) == len(sound) - missing and saved.store.problems == []


def test_repair_leaves_a_sound_run_as_it_is(folder: RunDir, call: Any, tmp_path: Path) -> None:
    code, text, _ = call("rollouts", "repair", folder.path, "--out", tmp_path / "copy")
    assert code == 0 and "0 of 1 files are damaged" in text
    assert Run.open(tmp_path / "copy").rollouts().equals(Run(folder).rollouts())
    assert segment(RunDir(tmp_path / "copy")).read_bytes() == segment(folder).read_bytes()
    code, _, error = call("rollouts", "repair", folder.path, "--out", tmp_path / "copy")
    assert code == 2 and "exists already" in error


def test_repair_loses_a_number_and_not_the_rollout(
    folder: RunDir, call: Any, tmp_path: Path
) -> None:
    run = copy_of(folder, tmp_path / "r")
    flip(segment(run), "rollouts/t_end")
    before = segment(run).read_bytes()
    code, text, _ = call("rollouts", "repair", run.path)
    assert code == 0 and "36 of 36 groups are saved" in text
    saved = Run.open(tmp_path / "r-repaired")
    assert saved.rollouts()["t_end"].isna().all()
    assert saved.rollouts()["reward"].equals(Run(folder).rollouts()["reward"])
    assert call("rollouts", "verify", saved.dir.path)[0] == 0
    assert segment(run).read_bytes() == before


def test_repair_keeps_the_groups_whose_rows_are_whole(
    folder: RunDir, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "CHUNK_ROWS", 512)
    monkeypatch.setattr(encode, "CONTIGUOUS_BYTES", 64)
    whole = make_run(tmp_path / "whole", Plan(**{**vars(SMALL), "num_steps": 20}))
    run = copy_of(whole, tmp_path / "r")
    flip(segment(run), "tokens/id")
    code, text, _ = call("rollouts", "repair", run.path)
    assert code == 0 and "rows of tokens/id are damaged" in text
    saved, original = Run.open(tmp_path / "r-repaired"), Run(whole)
    assert saved.store.problems == []
    for _, file in saved.store.scan():
        assert file.checked_block()[1] == []
    ids = saved.store.column("rollouts/rollout_id").tolist()
    total = original.store.num_rows("rollouts")
    assert 0 < len(ids) < total and len(ids) > total // 2
    for rollout_id in (ids[0], ids[len(ids) // 2], ids[-1]):
        a, b = saved.rollout(rollout_id), original.rollout(rollout_id)
        assert a.text == b.text and a.token_ids.tolist() == b.token_ids.tolist()
        assert (a.prompt, a.columns, a.versions) == (b.prompt, b.columns, b.versions)
        assert (a.generator, a.reward, a.group_id) == (b.generator, b.reward, b.group_id)


def test_repair_reads_a_file_that_was_cut_short_as_far_as_it_goes(
    folder: RunDir, call: Any, tmp_path: Path
) -> None:
    run = copy_of(folder, tmp_path / "r")
    data = segment(run).read_bytes()
    segment(run).write_bytes(data[: len(data) - 100])
    (run.rollouts / "segment_000001.h5").write_bytes(b"not HDF5 at all")
    code, text, _ = call("rollouts", "repair", run.path)
    assert code == 0 and "segment_000000.h5 cannot be opened" in text
    assert "segment_000001.h5: 0 of unknown groups are saved" in text
    assert "2 of 2 files are damaged" in text
    for _, file in Run.open(tmp_path / "r-repaired").store.scan():
        assert file.checked_block()[1] == []


def test_repair_reads_the_parts_of_an_open_segment(call: Any, tmp_path: Path) -> None:
    run = begin_run(tmp_path / "r", SMALL)
    write_attempt(run, SMALL, attempt=1, steps=range(4), close=False)
    parts = sorted(run.rollouts.rglob("part_*.h5"))
    flip(parts[1], "rollouts/group_id")
    with RolloutFileOf(parts[1]) as file:
        lost = file.num_rows()["groups"]
    total = Run(run).store.num_rows("groups")
    code, text, _ = call("rollouts", "repair", run.path, "--force")
    assert code == 0 and f"part_000001.h5: 0 of {lost} groups are saved" in text
    assert Run.open(tmp_path / "r-repaired").store.num_rows("groups") == total - lost


class RolloutFileOf:
    def __init__(self, path: Path) -> None:
        self.file = RolloutFile(path, path.name)

    def __enter__(self) -> RolloutFile:
        return self.file

    def __exit__(self, *_: object) -> None:
        self.file.close()


def test_repair_does_not_leave_out_what_only_a_newer_version_can_read(
    folder: RunDir, call: Any, tmp_path: Path
) -> None:
    run = copy_of(folder, tmp_path / "r")
    with h5py.File(segment(run), "r+", locking=False) as file:
        file.attrs["format_version"] = 2
    code, _, error = call("rollouts", "repair", run.path)
    assert code == 2 and "has format 2" in error and "install a newer one" in error
    assert not (tmp_path / "r-repaired").exists()


def test_repair_refuses_while_the_controller_lives(
    folder: RunDir, call: Any, tmp_path: Path
) -> None:
    run = copy_of(folder, tmp_path / "r")
    with FileLock(run.lock):
        code, _, error = call("rollouts", "repair", run.path)
        assert code == 2 and "is in use by its controller (pid 4711 on node-001)" in error
    assert not (tmp_path / "r-repaired").exists()
    begin_attempt(run, 2, resumed_from_step=3, started=0.0)  # on another host, not ended
    code, _, error = call("rollouts", "repair", run.path)
    assert code == 2 and "left as running by its controller" in error and "--force" in error
    assert call("rollouts", "repair", run.path, "--force")[0] == 0
