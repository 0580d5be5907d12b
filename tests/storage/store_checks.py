"""A store written from records, and compared with them field by field."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from llamarl_hpc.config.schema import StorageConfig
from llamarl_hpc.storage.records import GroupRecord
from llamarl_hpc.storage.rollout_store.layout import ENUMS
from llamarl_hpc.storage.rollout_store.reader import RolloutReader
from llamarl_hpc.storage.rollout_store.writer import RolloutWriter


def open_writer(folder: Path, attempt: int = 1, **config: Any) -> RolloutWriter:
    return RolloutWriter(
        folder,
        attempt=attempt,
        config=StorageConfig(**config),
        attributes={"run_id": "r1", "model": "tiny", "empty": ""},
        reward_names=["math_answer"],
        retry_s=5.0,
    )


def write(folder: Path, records: list[GroupRecord], flush_every: int = 8, **config: Any) -> None:
    with open_writer(folder, **config) as writer:
        for index, record in enumerate(records):
            writer.append(record)
            if index % flush_every == flush_every - 1:
                writer.flush(30)


def wait_for_names(folder: Path, names: list[str]) -> None:
    """A full segment is joined beside the writer."""
    deadline = time.monotonic() + 30
    while sorted(os.listdir(folder)) != names and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(os.listdir(folder)) == names


def check_equal(reader: RolloutReader, records: list[GroupRecord]) -> None:
    """Every field of every record is in the store, at its place."""
    assert reader.column("groups/group_id").tolist() == [r.group_id for r in records]
    row = 0
    for g, record in enumerate(records):
        group = reader.row(
            "groups",
            g,
            ["first_rollout", "num_rollouts", "step", "status", "t_issued", "prompt", "generator"],
        )
        assert group["first_rollout"] == row
        assert group["num_rollouts"] == len(record.completions)
        assert group["step"] == record.step
        assert group["status"] == ENUMS["status"][record.status]
        assert group["t_issued"] == record.t_issued
        name = reader.slice("generators/name", group["generator"], 1)[0]
        assert name.decode() == record.generator
        check_prompt(reader, group["prompt"], record)
        for index, completion in enumerate(record.completions):
            names = ["token_offset", "completion_length", "text_offset", "text_length", "reward"]
            stored = reader.row("rollouts", row, [*names, "advantage", "group"])
            assert stored["group"] == g
            assert stored["reward"] == record.reward[index]
            assert stored["advantage"] == record.advantage[index]
            span = (stored["token_offset"], stored["completion_length"])
            np.testing.assert_array_equal(reader.slice("tokens/id", *span), completion.token_ids)
            np.testing.assert_array_equal(
                reader.slice("tokens/logprob_behaviour", *span), completion.logprobs
            )
            np.testing.assert_array_equal(
                reader.slice("tokens/logprob_trainer", *span), record.logprobs_trainer[index]
            )
            text = reader.text("text/utf8", stored["text_offset"], stored["text_length"])
            assert text == completion.text
            row += 1
    assert reader.num_rows("rollouts") == row


def check_prompt(reader: RolloutReader, row: int, record: GroupRecord) -> None:
    names = ["token_offset", "token_length", "text_offset", "text_length", "prompt_id", "epoch"]
    prompt = reader.row("prompts", row, names)
    assert prompt["prompt_id"].decode() == record.prompt.prompt_id
    assert prompt["epoch"] == record.prompt.epoch
    text = reader.text("prompt_text/utf8", prompt["text_offset"], prompt["text_length"])
    assert text == record.prompt.text
    ids = reader.slice("prompt_tokens/id", prompt["token_offset"], prompt["token_length"])
    np.testing.assert_array_equal(ids, record.prompt.token_ids)
