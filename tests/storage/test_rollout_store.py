"""What is written to the rollout store is read back, every field of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from make_records import make_completion, make_record
from store_checks import check_equal, open_writer, wait_for_names, write

from llamarl_hpc.storage.rollout_store.reader import RolloutReader
from llamarl_hpc.types import Purpose, Status


@pytest.mark.parametrize("compression", ["none", "gzip", "lzf"])
def test_what_is_written_is_read_open_and_closed(tmp_path: Path, compression: str) -> None:
    records = [make_record(i) for i in range(40)]
    writer = open_writer(tmp_path, compression=compression, segment_rollouts=100)
    for index, record in enumerate(records):
        writer.append(record)
        if index % 8 == 7:
            writer.flush(30)
    wait_for_names(tmp_path, ["segment_000000.h5", "segment_000001.open"])
    live = RolloutReader(tmp_path)
    check_equal(live, records)
    writer.close()
    assert sorted(os.listdir(tmp_path)) == ["segment_000000.h5", "segment_000001.h5"]
    check_equal(live, records)  # a snapshot outlives the parts it was taken from
    check_equal(RolloutReader(tmp_path), records)


def test_groups_without_completions_and_foreign_components_keep_their_rows(tmp_path: Path) -> None:
    nothing: dict[str, Any] = {"completions": [], "rewards": {}, "reward": [], "advantage": []}
    lost = make_record(
        1,
        status=Status.ABANDONED,
        reason="generator.1 died",
        step=-1,
        logprobs_trainer=[],
        **nothing,
    )
    plain = make_record(0, rewards={"math_answer": [1.0, 0.0, 0.0, 1.0]})
    write(tmp_path, [plain, lost, make_record(2)], flush_every=1)
    reader = RolloutReader(tmp_path)
    assert reader.column("groups/num_rollouts").tolist() == [4, 0, 4]
    assert reader.column("groups/first_rollout").tolist() == [0, 4, 4]
    reason = reader.column("groups/reason")
    assert reader.column("reasons/text")[reason].tolist() == [b"", b"generator.1 died", b""]
    assert sorted(reader.reward_names) == ["length.penalty", "math_answer"]
    penalty = reader.column("rewards/length.penalty")
    assert np.isnan(penalty).tolist() == [True] * 5 + [False] * 3
    assert penalty[5:].tolist() == [-0.25] * 3


def test_version_spans_staleness_and_loss_mask_are_per_rollout(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    completions = [make_completion(rng, 3, 1), make_completion(rng, 4, 6)]
    record = make_record(
        20,
        completions=completions,
        rewards={},
        reward=[0.0, 1.0],
        advantage=[-0.5, 0.5],
        logprobs_trainer=[],
        loss_mask=[np.array([False]), np.ones(6, bool)],
    )
    write(tmp_path, [record])
    reader = RolloutReader(tmp_path)
    spans = reader.columns("versions", ["rollout", "start", "end", "version"])
    rows = list(
        zip(*(spans[n].tolist() for n in ("rollout", "start", "end", "version")), strict=True)
    )
    assert rows == [(0, 0, 1, 3), (1, 0, 3, 3), (1, 3, 6, 4)]
    assert reader.column("rollouts/staleness").tolist() == [5 - 3, 5 - 3]
    assert reader.column("rollouts/version_max").tolist() == [3, 4]
    assert reader.column("tokens/loss_mask").tolist() == [0] + [1] * 6
    assert np.isnan(reader.column("tokens/logprob_trainer")).all()


def test_staleness_counts_versions_and_not_steps_that_made_none(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    completions = [make_completion(rng, 3, 1), make_completion(rng, 4, 1)]
    values: dict[str, Any] = {"completions": completions, "rewards": {}, "logprobs_trainer": []}
    values |= {"reward": [0.0, 1.0], "advantage": [-0.5, 0.5]}
    # step 7, but the trainer was at version 4: three steps were refused
    write(tmp_path, [make_record(28, staleness=1, **values)])
    reader = RolloutReader(tmp_path)
    assert reader.column("rollouts/step").tolist() == [7, 7]
    assert reader.column("rollouts/version_min").tolist() == [3, 4]
    assert reader.column("rollouts/staleness").tolist() == [1, 0]


def test_loss_mask_defaults_to_what_the_status_says(tmp_path: Path) -> None:
    write(tmp_path, [make_record(0, num=1), make_record(1, num=1, status=Status.DROPPED)])
    lengths = RolloutReader(tmp_path).column("rollouts/completion_length")
    mask = RolloutReader(tmp_path).column("tokens/loss_mask")
    assert mask.tolist() == [1] * lengths[0] + [0] * lengths[1]


def test_a_prompt_is_stored_once_per_segment(tmp_path: Path) -> None:
    prompt = make_record(3).prompt
    records = [
        make_record(i, prompt=prompt, purpose=Purpose.EVAL, status=Status.EVALUATION)
        for i in range(20)
    ]
    records.append(make_record(7))
    write(tmp_path, records, flush_every=4)
    reader = RolloutReader(tmp_path)
    assert reader.num_rows("prompts") == 2
    assert reader.num_rows("generators") == 2
    check_equal(reader, records)


def test_a_lone_surrogate_in_a_text_does_not_end_the_run(tmp_path: Path) -> None:
    record = make_record(0, num=1)
    completion = msgspec.structs.replace(record.completions[0], text="a\ud800b")
    write(tmp_path, [msgspec.structs.replace(record, completions=[completion])])
    reader = RolloutReader(tmp_path)
    assert reader.text("text/utf8", 0, reader.num_rows("text")) == "a?b"
