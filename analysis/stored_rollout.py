"""One completion with all that the store keeps of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamarl_hpc.storage.rollout_store.layout import COLUMNS, ENUMS
from llamarl_hpc.storage.rollout_store.reader import RolloutReader
from llamarl_hpc.types import Array, VersionSpan

NAMES = {kind: {code: name for name, code in codes.items()} for kind, codes in ENUMS.items()}
"""Texts of the codes, by column."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRollout:
    """One completion with all that the store keeps of it. T = number of its tokens."""

    rollout_id: int
    group_id: int
    purpose: str
    status: str
    reason: str
    attempt: int
    step: int
    generator: str
    prompt_id: str
    epoch: int
    prompt: str
    columns: dict[str, Any]
    prompt_ids: Array  # int32 [P]
    text: str
    token_ids: Array  # int32 [T]
    logprob_behaviour: Array  # float32 [T]
    logprob_trainer: Array  # float32 [T], NaN if not trained
    logprob_reference: Array  # float32 [T], NaN without a reference policy
    entropy: Array  # float32 [T], NaN without algorithm.entropy_coef
    loss_mask: Array  # uint8 [T]
    versions: list[VersionSpan]
    staleness: int
    reward: float
    advantage: float
    rewards: dict[str, float]  # NaN where a component does not apply
    finish_reason: str
    temperature: float
    t_start: float
    t_end: float

    @property
    def ratio(self) -> Array:
        """float32 [T]: probability under the trainer over that under the generator."""
        ratio: Array = np.exp(self.logprob_trainer - self.logprob_behaviour)
        return ratio


def stored_rollout(store: RolloutReader, row: int) -> StoredRollout:
    """The completion at a row of the table `rollouts`."""
    names = [column.name for column in COLUMNS.values() if column.table == "rollouts"]
    values = store.row("rollouts", row, names)
    prompt_names = [column.name for column in COLUMNS.values() if column.table == "prompts"]
    prompt = store.row("prompts", values["prompt"], prompt_names)
    columns = store.text("prompt_columns/utf8", prompt["columns_offset"], prompt["columns_length"])
    token = (values["token_offset"], values["completion_length"])
    reason = store.row("groups", values["group"], ["reason"])["reason"]
    return StoredRollout(
        **{name: values[name] for name in _SCALARS},
        purpose=NAMES["purpose"][values["purpose"]],
        status=NAMES["status"][values["status"]],
        finish_reason=NAMES["finish_reason"][values["finish_reason"]],
        reason=store.slice("reasons/text", reason, 1)[0].decode(),
        generator=store.slice("generators/name", values["generator"], 1)[0].decode(),
        prompt_id=prompt["prompt_id"].decode(),
        epoch=prompt["epoch"],
        prompt=store.text("prompt_text/utf8", prompt["text_offset"], prompt["text_length"]),
        columns=json.loads(columns or "{}"),
        prompt_ids=store.slice("prompt_tokens/id", prompt["token_offset"], prompt["token_length"]),
        text=store.text("text/utf8", values["text_offset"], values["text_length"]),
        token_ids=store.slice("tokens/id", *token),
        logprob_behaviour=store.slice("tokens/logprob_behaviour", *token),
        logprob_trainer=store.slice("tokens/logprob_trainer", *token),
        logprob_reference=store.slice("tokens/logprob_reference", *token),
        entropy=store.slice("tokens/entropy", *token),
        loss_mask=store.slice("tokens/loss_mask", *token),
        versions=store.version_spans(row),
        rewards={
            name: float(store.slice(f"rewards/{name}", row, 1)[0])
            for name in store.reward_names_at(row)
        },
    )


_SCALARS = (
    "rollout_id",
    "group_id",
    "attempt",
    "step",
    "staleness",
    "reward",
    "advantage",
    "temperature",
    "t_start",
    "t_end",
)
