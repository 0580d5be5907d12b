"""Blocks of columns in memory: made from records, joined, checked. Pure numpy.

Letters: G groups, R rollouts, N tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from llamarl_hpc.storage.records import GroupRecord
from llamarl_hpc.storage.rollout_store.layout import (
    COLUMNS,
    ENUMS,
    TABLES,
    Block,
    column_of,
    empty_column,
    reward_column,
)
from llamarl_hpc.types import Array, Completion, Prompt, Status

# Columns (offset, length) that point into a flat table.
_RAGGED = {
    "rollouts": (
        ("token_offset", "completion_length", "tokens"),
        ("text_offset", "text_length", "text"),
    ),
    "prompts": (
        ("token_offset", "token_length", "prompt_tokens"),
        ("text_offset", "text_length", "prompt_text"),
        ("columns_offset", "columns_length", "prompt_columns"),
    ),
}


def from_records(
    records: Sequence[GroupRecord], *, reward_names: Sequence[str], first_rollout_id: int
) -> Block:
    """The block of some groups, rows in the order of the records."""
    builder = _Builder()
    rollout_id = first_rollout_id
    for record in records:
        builder.add_group(record, rollout_id)
        rollout_id += len(record.completions)
    names = dict.fromkeys([*reward_names, *(n for record in records for n in record.rewards)])
    for name in names:
        scores = [
            score
            for record in records
            for score in _padded(record.rewards.get(name), len(record.completions))
        ]
        builder.add(reward_column(name).path, scores)
    return builder.block()


class _Builder:
    """Columns as Python lists, turned into arrays once."""

    def __init__(self) -> None:
        self._lists: dict[str, list[Any]] = {path: [] for path in COLUMNS}
        self._arrays: dict[str, list[Array]] = {
            path: [] for path in COLUMNS if path.split("/")[0] in ("tokens", "prompt_tokens")
        }
        self._bytes: dict[str, bytearray] = {
            path: bytearray() for path in COLUMNS if path.endswith("/utf8")
        }
        self._prompts: dict[tuple[str, int], int] = {}
        self._names: dict[str, dict[str, int]] = {"generators/name": {}, "reasons/text": {}}
        self._num_tokens = 0
        self._num_prompt_tokens = 0

    def add(self, path: str, values: Sequence[float | None]) -> None:
        self._lists[path] = [np.nan if value is None else value for value in values]

    def add_group(self, record: GroupRecord, first_rollout_id: int) -> None:
        lists = self._lists
        group, rollout = len(lists["groups/group_id"]), len(lists["rollouts/rollout_id"])
        shared = {
            "purpose": ENUMS["purpose"][record.purpose],
            "group_id": record.group_id,
            "attempt": record.attempt,
            "status": ENUMS["status"][record.status],
            "step": record.step,
            "prompt": self._prompt(record.prompt),
            "generator": self._name("generators/name", record.generator),
        }
        own = {
            "issue": record.issue,
            "reason": self._name("reasons/text", record.reason),
            "staleness": record.staleness,
            "first_rollout": rollout,
            "num_rollouts": len(record.completions),
            "t_issued": record.t_issued,
            "t_resolved": record.t_resolved,
        }
        for name, value in (shared | own).items():
            lists[f"groups/{name}"].append(value)
        for index, completion in enumerate(record.completions):
            row = shared | {"group": group, "rollout_id": first_rollout_id + index}
            row |= self._completion(record, index, completion, rollout + index)
            for name, value in row.items():
                lists[f"rollouts/{name}"].append(value)

    def _completion(
        self, record: GroupRecord, index: int, completion: Completion, rollout: int
    ) -> dict[str, Any]:
        length = len(completion.token_ids)
        trained = record.status is Status.TRAINED
        row: dict[str, Any] = {
            "version_min": completion.version_min,
            "version_max": completion.version_max,
            "staleness": record.step - completion.version_min if trained else record.staleness,
            "reward": _at(record.reward, index, np.nan),
            "advantage": _at(record.advantage, index, np.nan),
            "finish_reason": ENUMS["finish_reason"][completion.finish_reason],
            "temperature": record.temperature,
            "completion_length": length,
            "token_offset": self._num_tokens,
            "t_start": completion.t_start,
            "t_end": completion.t_end,
        }
        row["text_offset"], row["text_length"] = self._text("text/utf8", completion.text)
        self._num_tokens += length
        tokens = {
            "id": completion.token_ids,
            "logprob_behaviour": completion.logprobs,
            "logprob_trainer": _at(record.logprobs_trainer, index, np.full(length, np.nan)),
            "loss_mask": _at(record.loss_mask, index, np.full(length, trained)),
        }
        for name, array in tokens.items():
            assert len(array) == length, f"{name} has {len(array)} entries for {length} tokens"
            self._arrays[f"tokens/{name}"].append(array)
        for span in completion.versions:
            for name, value in zip(("start", "end", "version"), span_fields(span), strict=True):
                self._lists[f"versions/{name}"].append(value)
            self._lists["versions/rollout"].append(rollout)
        return row

    def _prompt(self, prompt: Prompt) -> int:
        key = (prompt.prompt_id, prompt.epoch)
        if key in self._prompts:
            return self._prompts[key]
        text_offset, text_length = self._text("prompt_text/utf8", prompt.text)
        columns = json.dumps(prompt.columns, default=str, ensure_ascii=False)
        columns_offset, columns_length = self._text("prompt_columns/utf8", columns)
        row = {
            "prompt_id": prompt.prompt_id.encode(),
            "epoch": prompt.epoch,
            "token_length": len(prompt.token_ids),
            "token_offset": self._num_prompt_tokens,
            "text_length": text_length,
            "text_offset": text_offset,
            "columns_length": columns_length,
            "columns_offset": columns_offset,
        }
        for name, value in row.items():
            self._lists[f"prompts/{name}"].append(value)
        self._arrays["prompt_tokens/id"].append(prompt.token_ids)
        self._num_prompt_tokens += len(prompt.token_ids)
        return self._prompts.setdefault(key, len(self._prompts))

    def _name(self, path: str, text: str) -> int:
        return self._names[path].setdefault(text, len(self._names[path]))

    def _text(self, path: str, text: str) -> tuple[int, int]:
        data = text.encode("utf-8", errors="replace")  # a lone surrogate must not end a run
        offset = len(self._bytes[path])
        self._bytes[path] += data
        return offset, len(data)

    def block(self) -> Block:
        for path, names in self._names.items():
            self._lists[path] = [name.encode() for name in names]
        block: Block = {}
        for path, values in self._lists.items():
            dtype = column_of(path).dtype
            if path in self._bytes:
                block[path] = np.frombuffer(bytes(self._bytes[path]), dtype=np.uint8)
            elif path in self._arrays:
                parts = self._arrays[path]
                whole = np.concatenate(parts) if parts else np.zeros(0)
                block[path] = whole.astype(dtype, copy=False)
            elif dtype == "S":
                block[path] = np.array(values, dtype="S") if values else np.zeros(0, dtype="S1")
            else:
                block[path] = np.array(values, dtype=dtype)
        return block


def span_fields(span: Any) -> tuple[int, int, int]:
    """start, end, version of a `VersionSpan`."""
    return span.start, span.end, span.version


def num_rows(block: Block, table: str) -> int:
    """Rows of a table."""
    return next((len(array) for path, array in block.items() if path.startswith(f"{table}/")), 0)


def num_bytes(block: Block) -> int:
    return sum(array.nbytes for array in block.values())


def join(blocks: Sequence[Block]) -> Block:
    """One block with the rows of all, in order: references shifted, equal prompts and names once.

    Raises ValueError for no block at all.
    """
    if not blocks:
        raise ValueError("nothing to join")
    paths = dict.fromkeys(path for block in blocks for path in block)
    base = dict.fromkeys(TABLES, 0)
    parts: dict[str, list[Array]] = {path: [] for path in paths}
    for block in blocks:
        for path in paths:
            column = column_of(path)
            array = block.get(path)
            if array is None:  # a reward component that came later
                table = "rollouts" if column.table == "rewards" else column.table
                array = empty_column(column, num_rows(block, table))
            if column.refers:
                array = (array + base[column.refers]).astype(array.dtype)
            parts[path].append(array)
        for table in TABLES:
            base[table] += num_rows(block, table)
    joined = {path: np.concatenate(arrays) for path, arrays in parts.items()}
    return _deduplicate(joined)


def _deduplicate(block: Block) -> Block:
    """Keep the first of equal rows of the tables that are looked up by row number."""
    keys = {
        "prompts": list(
            zip(block["prompts/prompt_id"], block["prompts/epoch"].tolist(), strict=True)
        ),
        "generators": block["generators/name"].tolist(),
        "reasons": block["reasons/text"].tolist(),
    }
    for table, values in keys.items():
        block = _keep_first(block, table, values)
    return block


def _keep_first(block: Block, table: str, keys: Iterable[Any]) -> Block:
    first: dict[Any, int] = {}
    new_row = np.array([first.setdefault(key, len(first)) for key in keys], dtype=np.int64)
    if len(first) == len(new_row):
        return block
    kept = np.unique(new_row, return_index=True)[1]  # ascending: first occurrence of each
    block = dict(block)
    for path in [path for path in block if path.startswith(f"{table}/")]:
        block[path] = block[path][kept]
    for path, array in block.items():
        if column_of(path).refers == table:
            block[path] = new_row[array].astype(array.dtype)
    for offset, length, flat in _RAGGED.get(table, ()):
        offset, length = f"{table}/{offset}", f"{table}/{length}"
        rows = ragged_rows(block[offset], block[length])
        for path in [path for path in block if path.startswith(f"{flat}/")]:
            block[path] = block[path][rows]
        block[offset] = offsets(block[length])
    return block


def offsets(lengths: Array) -> Array:
    """Where each of some adjacent runs starts: [0, l0, l0 + l1, ...], int64."""
    total = np.cumsum(lengths, dtype=np.int64)
    return total - lengths


def ragged_rows(start: Array, length: Array) -> Array:
    """Row numbers start[0]..start[0]+length[0]-1, start[1].., in one array, int64."""
    total = int(length.sum())
    steps = np.arange(total, dtype=np.int64)
    return steps + np.repeat(start.astype(np.int64) - offsets(length), length)


def problems(block: Block) -> list[str]:
    """What is wrong inside a block: sentences; empty when it is sound."""
    lengths: dict[str, set[int]] = {}
    for path, array in block.items():
        table = path.split("/")[0]
        lengths.setdefault("rollouts" if table == "rewards" else table, set()).add(len(array))
    found = [f"{t} has columns of lengths {sorted(n)}" for t, n in lengths.items() if len(n) > 1]
    if found:
        return found
    for column in COLUMNS.values():
        rows = block[column.path]
        # Offsets and first_rollout may be one past the end where the run they start is empty.
        if not column.refers or "offset" in column.name or "first" in column.name:
            continue
        if len(rows) and not 0 <= rows.min() <= rows.max() < num_rows(block, column.refers):
            found.append(f"{column.path} points outside of {column.refers}")
    if found:
        return found
    found += _adjacent("groups/first_rollout", "groups/num_rollouts", "rollouts", block)
    for table, runs in _RAGGED.items():
        for offset, length, flat in runs:
            found += _adjacent(f"{table}/{offset}", f"{table}/{length}", flat, block)
    covered = np.bincount(
        block["versions/rollout"],
        weights=block["versions/end"] - block["versions/start"],
        minlength=num_rows(block, "rollouts"),
    )
    wrong = int((covered != block["rollouts/completion_length"]).sum())
    if wrong:
        found.append(f"version spans do not cover the tokens of {wrong} rollouts")
    return found


def _adjacent(start: str, length: str, flat: str, block: Block) -> list[str]:
    """Runs must follow one another without gaps and fill their table."""
    whole, wanted = int(block[length].sum()), num_rows(block, flat)
    if whole != wanted:
        return [f"{length} adds up to {whole}, but {flat} has {wanted} rows"]
    if not np.array_equal(block[start], offsets(block[length])):
        return [f"{start} does not follow {length}"]
    return []


def _padded(values: Sequence[float | None] | None, length: int) -> list[float | None]:
    return list(values) if values else [None] * length


def _at(values: Sequence[Any], index: int, default: Any) -> Any:
    return values[index] if values else default
