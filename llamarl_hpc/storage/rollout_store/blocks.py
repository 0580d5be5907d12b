"""Blocks of columns in memory: joined and checked. Pure numpy. `build` makes them from records.

Letters: G groups, R rollouts, N tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from llamarl_hpc.storage.rollout_store.layout import (
    COLUMNS,
    TABLES,
    Block,
    column_of,
    empty_column,
)
from llamarl_hpc.types import Array

# Columns (offset, length) that point into a flat table.
RAGGED = {
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
    for offset, length, flat in RAGGED.get(table, ()):
        offset, length = f"{table}/{offset}", f"{table}/{length}"
        rows = ragged_rows(block[offset], block[length])
        for path in [path for path in block if path.startswith(f"{flat}/")]:
            block[path] = block[path][rows]
        block[offset] = offsets(block[length])
    return block


def take_groups(block: Block, first: int, last: int) -> Block:
    """The block of groups first..last (last excluded), references and offsets its own."""
    groups = slice(first, last)
    start = block["groups/first_rollout"][groups]
    length = block["groups/num_rollouts"][groups]
    rollouts = ragged_rows(start, length)
    spans = np.flatnonzero(np.isin(block["versions/rollout"], rollouts))
    prompts = np.unique(block["groups/prompt"][groups])
    rows = {
        "groups": np.arange(first, last),
        "rollouts": rollouts,
        "versions": spans,
        "prompts": prompts,
        "generators": np.unique(block["groups/generator"][groups]),
        "reasons": np.unique(block["groups/reason"][groups]),
    }
    for table, runs in RAGGED.items():
        for offset, of, flat in runs:
            at, n = block[f"{table}/{offset}"], block[f"{table}/{of}"]
            rows[flat] = ragged_rows(at[rows[table]], n[rows[table]])
    taken = {}
    for path, array in block.items():
        table = path.split("/")[0]
        taken[path] = array[rows["rollouts" if table == "rewards" else table]]
    for path, array in taken.items():
        refers = column_of(path).refers
        if refers and not path.endswith(("_offset", "/first_rollout")):
            taken[path] = np.searchsorted(rows[refers], array).astype(array.dtype)
    for table, runs in RAGGED.items():
        for offset, of, _ in runs:
            taken[f"{table}/{offset}"] = offsets(taken[f"{table}/{of}"])
    taken["groups/first_rollout"] = offsets(taken["groups/num_rollouts"])
    return taken


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
        if column.optional:
            continue
        rows = block[column.path]
        # Offsets and first_rollout may be one past the end where the run they start is empty.
        if not column.refers or "offset" in column.name or "first" in column.name:
            continue
        if len(rows) and not 0 <= rows.min() <= rows.max() < num_rows(block, column.refers):
            found.append(f"{column.path} points outside of {column.refers}")
    if found:
        return found
    found += _adjacent("groups/first_rollout", "groups/num_rollouts", "rollouts", block)
    for table, runs in RAGGED.items():
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
