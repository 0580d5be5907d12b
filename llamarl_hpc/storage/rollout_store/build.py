"""Columns from records, a whole flush at a time: no work per token and little per rollout.

Letters: G groups, R rollouts, N tokens, S version spans, P prompts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from llamarl_hpc.storage.records import GroupRecord
from llamarl_hpc.storage.rollout_store.blocks import offsets
from llamarl_hpc.storage.rollout_store.layout import (
    COLUMNS,
    ENUMS,
    Block,
    column_of,
    empty_column,
    reward_column,
)
from llamarl_hpc.types import Array, Completion, Prompt, Status

# What a rollout's row repeats of its group's.
_SHARED = ("group_id", "purpose", "status", "attempt", "step", "prompt", "generator")


def from_records(
    records: Sequence[GroupRecord], *, reward_names: Sequence[str], first_rollout_id: int
) -> Block:
    """The block of some groups, rows in the order of the records."""
    completions = [completion for record in records for completion in record.completions]
    columns, rows = _prompts([record.prompt for record in records])
    columns |= _groups(records, rows)
    columns |= _tokens(records, completions)
    columns |= _versions(completions)
    columns |= _rollouts(records, completions, columns, first_rollout_id)
    columns |= _rewards(records, reward_names)
    return {path: _array(path, values) for path, values in columns.items()}


def _array(path: str, values: Any) -> Array:
    """As the format wants it; nothing is copied that has the right type already."""
    dtype = column_of(path).dtype
    if dtype == "S":
        return np.array(values, dtype="S") if len(values) else empty_column(column_of(path))
    return np.asarray(values).astype(dtype, copy=False)


def _groups(records: Sequence[GroupRecord], prompt_rows: list[int]) -> dict[str, Any]:
    counts = np.array([len(record.completions) for record in records], dtype=np.int32)
    names: dict[str, int] = {}
    reasons: dict[str, int] = {}
    own = {
        "purpose": [ENUMS["purpose"][r.purpose] for r in records],
        "group_id": [r.group_id for r in records],
        "attempt": [r.attempt for r in records],
        "issue": [r.issue for r in records],
        "status": [ENUMS["status"][r.status] for r in records],
        "reason": [reasons.setdefault(r.reason, len(reasons)) for r in records],
        "step": [r.step for r in records],
        "prompt": prompt_rows,
        "generator": [names.setdefault(r.generator, len(names)) for r in records],
        "staleness": [r.staleness for r in records],
        "first_rollout": offsets(counts),
        "num_rollouts": counts,
        "t_issued": [r.t_issued for r in records],
        "t_resolved": [r.t_resolved for r in records],
    }
    found: dict[str, Any] = {f"groups/{name}": values for name, values in own.items()}
    found["generators/name"] = [name.encode() for name in names]
    found["reasons/text"] = [reason.encode() for reason in reasons]
    return found


def _rollouts(
    records: Sequence[GroupRecord],
    completions: Sequence[Completion],
    columns: dict[str, Any],
    first_rollout_id: int,
) -> dict[str, Any]:
    """[R] each. `columns` holds those of groups and versions."""
    counts = columns["groups/num_rollouts"]
    group = np.repeat(np.arange(len(records), dtype=np.int64), counts)
    finish = ENUMS["finish_reason"]
    lengths = _lengths([c.token_ids for c in completions])
    starts = offsets(_lengths([c.versions for c in completions]))
    versions = columns["versions/version"]
    oldest = np.minimum.reduceat(versions, starts) if len(starts) else starts
    newest = np.maximum.reduceat(versions, starts) if len(starts) else starts
    texts, text_lengths = _texts(c.text for c in completions)
    own: dict[str, Any] = {
        name: _array(f"groups/{name}", columns[f"groups/{name}"])[group] for name in _SHARED
    }
    # of the group at its oldest rollout; steps do not tell it, for some make no version
    staleness = np.array([r.staleness for r in records], dtype=np.int64)[group]
    oldest_of_group = np.full(len(records), np.iinfo(np.int64).max)
    np.minimum.at(oldest_of_group, group, oldest)
    own |= {
        "rollout_id": first_rollout_id + np.arange(len(completions), dtype=np.int64),
        "group": group,
        "version_min": oldest,
        "version_max": newest,
        "staleness": np.where(
            own["status"] == ENUMS["status"][Status.TRAINED],
            staleness + oldest_of_group[group] - oldest,
            staleness,
        ),
        "reward": _per_rollout(records, [r.reward for r in records]),
        "advantage": _per_rollout(records, [r.advantage for r in records]),
        "finish_reason": np.array([finish[c.finish_reason] for c in completions], dtype=np.uint8),
        "temperature": np.repeat(np.array([r.temperature for r in records], np.float32), counts),
        "completion_length": lengths,
        "token_offset": offsets(lengths),
        "text_length": text_lengths,
        "text_offset": offsets(text_lengths),
        "t_start": [c.t_start for c in completions],
        "t_end": [c.t_end for c in completions],
    }
    return {f"rollouts/{name}": values for name, values in own.items()} | {"text/utf8": texts}


def _tokens(records: Sequence[GroupRecord], completions: Sequence[Completion]) -> dict[str, Array]:
    """[N] each; what a record leaves out of trainer's log-probs and loss mask is filled in."""
    trainer: list[Array] = []
    mask: list[Array] = []
    for record in records:
        lengths = [len(completion.token_ids) for completion in record.completions]
        trained = record.status is Status.TRAINED
        trainer += record.logprobs_trainer or [np.full(sum(lengths), np.nan, np.float32)]
        mask += record.loss_mask or [np.full(sum(lengths), trained)]
        for name, arrays in (("trainer", record.logprobs_trainer), ("mask", record.loss_mask)):
            assert not arrays or [len(array) for array in arrays] == lengths, (
                f"{name} of group {record.group_id} does not have {lengths} tokens"
            )
    found = {
        "id": [completion.token_ids for completion in completions],
        "logprob_behaviour": [completion.logprobs for completion in completions],
        "logprob_trainer": trainer,
        "loss_mask": mask,
    }
    for name, of in (("entropy", "entropy"), ("logprob_reference", "logprobs_reference")):
        if any(getattr(record, of) for record in records):
            found[name] = [
                part for record in records for part in _known(record, getattr(record, of))
            ]
    flat = {f"tokens/{name}": _joined(f"tokens/{name}", parts) for name, parts in found.items()}
    assert len({len(array) for array in flat.values()}) == 1, "log-probs and tokens differ"
    return flat


def _known(record: GroupRecord, arrays: list[Array]) -> list[Array]:
    """One array per completion, NaN where the record has none."""
    return arrays or [np.full(len(c.token_ids), np.nan, np.float32) for c in record.completions]


def _versions(completions: Sequence[Completion]) -> dict[str, Array]:
    """[S] each. Every completion has a span at least, for it has a token."""
    counts = _lengths([c.versions for c in completions])
    assert counts.all(), "a completion has no version span"
    spans = [span for completion in completions for span in completion.versions]
    return {
        "versions/rollout": np.repeat(np.arange(len(completions), dtype=np.int64), counts),
        "versions/start": np.array([span.start for span in spans], dtype=np.int32),
        "versions/end": np.array([span.end for span in spans], dtype=np.int32),
        "versions/version": np.array([span.version for span in spans], dtype=np.int64),
    }


def _prompts(prompts: Sequence[Prompt]) -> tuple[dict[str, Any], list[int]]:
    """The columns of the distinct prompts [P], and for each given one its row."""
    row_of: dict[tuple[str, int], int] = {}
    distinct: list[Prompt] = []
    rows: list[int] = []
    for prompt in prompts:
        key = (prompt.prompt_id, prompt.epoch)
        if key not in row_of:
            row_of[key] = len(distinct)
            distinct.append(prompt)
        rows.append(row_of[key])
    token_lengths = _lengths([p.token_ids for p in distinct])
    texts, text_lengths = _texts(p.text for p in distinct)
    data, data_lengths = _texts(
        json.dumps(p.columns, default=str, ensure_ascii=False) for p in distinct
    )
    return {
        "prompts/prompt_id": [p.prompt_id.encode() for p in distinct],
        "prompts/epoch": [p.epoch for p in distinct],
        "prompts/token_length": token_lengths,
        "prompts/token_offset": offsets(token_lengths),
        "prompts/text_length": text_lengths,
        "prompts/text_offset": offsets(text_lengths),
        "prompts/columns_length": data_lengths,
        "prompts/columns_offset": offsets(data_lengths),
        "prompt_tokens/id": _joined("prompt_tokens/id", [p.token_ids for p in distinct]),
        "prompt_text/utf8": texts,
        "prompt_columns/utf8": data,
    }, rows


def _rewards(records: Sequence[GroupRecord], names: Sequence[str]) -> dict[str, Array]:
    every = dict.fromkeys([*names, *(name for record in records for name in record.rewards)])
    return {
        reward_column(name).path: _per_rollout(records, [r.rewards.get(name) for r in records])
        for name in every
    }


def _per_rollout(
    records: Sequence[GroupRecord], values: Iterable[Sequence[float | None] | None]
) -> Array:
    """float64 [R]: one list per record; NaN for None and for the rollouts of a missing list."""
    lists = [
        given or [None] * len(record.completions)
        for record, given in zip(records, values, strict=True)
    ]
    for record, given in zip(records, lists, strict=True):
        assert len(given) == len(record.completions), (
            f"group {record.group_id} has {len(given)} values, {len(record.completions)} rollouts"
        )
    return np.array(list(chain.from_iterable(lists)), dtype=np.float64)  # None becomes NaN


def _lengths(runs: Sequence[Any]) -> Array:
    return np.fromiter(map(len, runs), dtype=np.int32, count=len(runs))


def _joined(path: str, parts: Sequence[Array]) -> Array:
    dtype = COLUMNS[path].dtype
    if not parts:
        return np.zeros(0, dtype=dtype)
    return np.concatenate(parts, dtype=dtype, casting="unsafe")


def _texts(texts: Iterable[str]) -> tuple[Array, Array]:
    """UTF-8 bytes end to end (uint8) and the length of each; a lone surrogate becomes `?`."""
    encoded = [text.encode("utf-8", errors="replace") for text in texts]
    return np.frombuffer(b"".join(encoded), dtype=np.uint8), _lengths(encoded)
