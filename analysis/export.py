"""Rollouts as Arrow, file by file, and from there to parquet, JSON Lines and polars.

Memory stays that of one file of the store, however long the run. One row per completion.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.storage.rollout_store import build
from llamarl_hpc.storage.rollout_store.encode import encode
from llamarl_hpc.storage.rollout_store.file import RolloutFile
from llamarl_hpc.storage.rollout_store.layout import COLUMNS, ENUMS
from llamarl_hpc.types import Array

if TYPE_CHECKING:
    import pyarrow as pa

    from analysis.read_run import Run

_SCALARS = (
    "rollout_id",
    "group_id",
    "attempt",
    "step",
    "version_min",
    "version_max",
    "staleness",
    "reward",
    "advantage",
    "temperature",
    "completion_length",
    "t_start",
    "t_end",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRows:
    """Rollouts of one file that fit a filter. R = number of them."""

    file: RolloutFile
    rows: Array  # int64 [R], within the file

    def column(self, path: str) -> Array:
        """[R] of a column of `rollouts` or `rewards`."""
        return self.file.read(path)[self.rows]

    def texts(self) -> list[str]:
        """The completions."""
        return self.file.texts("rollouts/text", "text/utf8", self.rows)

    def prompts(self) -> list[str]:
        rows = self.column("rollouts/prompt")
        return self.file.texts("prompts/text", "prompt_text/utf8", rows)

    def data_rows(self) -> list[str]:
        """The data row of each prompt, JSON."""
        rows = self.column("rollouts/prompt")
        return self.file.texts("prompts/columns", "prompt_columns/utf8", rows)


def file_rows(run: Run, **filters: Any) -> Iterator[FileRows]:
    """The rollouts that fit (`Run.rollout_mask`), file by file, in the order of the store."""
    mask = run.rollout_mask(**filters)
    base = 0
    for _, file in run.store.scan():
        num_rollouts = file.num_rows()["rollouts"]
        rows = np.flatnonzero(mask[base : base + num_rollouts])
        base += num_rollouts
        if len(rows):
            yield FileRows(file=file, rows=rows)


def arrow_tables(
    run: Run, *, text: bool = True, tokens: bool = False, **filters: Any
) -> Iterator[pa.Table]:
    """One table per file of the store, all of one schema; an empty one when nothing fits."""
    names, lists = run.reward_names, _token_columns(run) if tokens else []
    empty = True
    for rows in file_rows(run, **filters):
        empty = False
        yield _arrow(rows, names, lists, text=text)
    if empty:
        yield _arrow(_no_rows(names), names, lists, text=text)


def _no_rows(reward_names: list[str]) -> FileRows:
    """Of a file that has every column and nothing in them."""
    block = build.from_records([], reward_names=reward_names, first_rollout_id=-1)
    image = b"".join(encode(block, {"first_rollout_id": -1}))
    return FileRows(file=RolloutFile(image, "nothing"), rows=np.zeros(0, dtype=np.int64))


def to_arrow(run: Run, *, text: bool = True, tokens: bool = False, **filters: Any) -> pa.Table:
    """One row per completion; `tokens` adds lists: all that the store keeps of each token."""
    import pyarrow as pa

    return pa.concat_tables(arrow_tables(run, text=text, tokens=tokens, **filters))


def _arrow(rows: FileRows, reward_names: list[str], lists: list[str], *, text: bool) -> pa.Table:
    import pyarrow as pa

    file = rows.file
    columns: dict[str, Any] = {name: rows.column(f"rollouts/{name}") for name in _SCALARS}
    for name in ("purpose", "status", "finish_reason"):
        columns[name] = _named(rows.column(f"rollouts/{name}"), list(ENUMS[name]))
    columns["generator"] = _looked_up(file, "generators/name", rows.column("rollouts/generator"))
    reason = file.read("groups/reason")[rows.column("rollouts/group")]
    columns["reason"] = _looked_up(file, "reasons/text", reason)
    prompt = rows.column("rollouts/prompt")
    columns["prompt_id"] = _looked_up(file, "prompts/prompt_id", prompt)
    columns["epoch"] = file.read("prompts/epoch")[prompt]
    columns["prompt_length"] = file.read("prompts/token_length")[prompt]
    for name in reward_names:
        columns[f"rewards/{name}"] = rows.column(f"rewards/{name}")
    if text:
        columns["prompt"] = pa.array(rows.prompts(), pa.large_string())
        columns["completion"] = pa.array(rows.texts(), pa.large_string())
        columns["columns"] = pa.array(rows.data_rows(), pa.large_string())
    if lists:
        columns |= _token_lists(rows, lists)
    return pa.table(columns)


def _named(codes: Array, names: list[str]) -> Any:
    import pyarrow as pa

    return pa.array([names[code] for code in codes.tolist()], pa.string())


def _looked_up(file: RolloutFile, path: str, rows: Array) -> Any:
    texts = [text.decode("utf-8", errors="replace") for text in file.read(path).tolist()]
    return _named(rows, texts)


def _token_columns(run: Run) -> list[str]:
    """Names in table `tokens`; what only some runs have, where a file has it."""
    columns = [column for column in COLUMNS.values() if column.table == "tokens"]
    files = [file for _, file in run.store.scan()]
    return [c.name for c in columns if not c.optional or any(f.has(c.path) for f in files)]


def _token_lists(rows: FileRows, names: list[str]) -> dict[str, Any]:
    import pyarrow as pa

    from llamarl_hpc.storage.rollout_store.blocks import ragged_rows

    length = rows.column("rollouts/completion_length")
    wanted = ragged_rows(rows.column("rollouts/token_offset"), length)
    offsets = np.concatenate([[0], np.cumsum(length, dtype=np.int64)])
    found = {}
    for name in names:
        values = rows.file.read(f"tokens/{name}")[wanted]
        flat = values.astype(bool) if name == "loss_mask" else values
        key = "token_ids" if name == "id" else name
        found[key] = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(flat))
    return found


# ---------------------------------------------------------------- files


def export(
    run: Run, out: Path, kind: str, *, text: bool = True, tokens: bool = False, **filters: Any
) -> int:
    """Write `out` as "parquet" or "jsonl"; the number of rollouts in it.

    The file appears when it is whole. Raises ConfigError for another kind or a place that cannot
    be written.
    """
    writers = {"parquet": _write_parquet, "jsonl": _write_json_lines}
    if kind not in writers:
        raise ConfigError(f"--to is one of {', '.join(writers)}; got {kind!r}")
    beside = out.with_name(f".{out.name}.part")
    make = partial(arrow_tables, run, text=text, tokens=tokens, **filters)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        num = writers[kind](beside, make())
        beside.replace(out)
    except OSError as error:
        if error.errno is None:  # a damaged file of the store, not the place to write to
            raise
        raise ConfigError(f"cannot write {out}: {error.strerror}; choose another --out") from error
    finally:
        with suppress(OSError):
            beside.unlink()
    return num


def _write_parquet(path: Path, tables: Iterator[pa.Table]) -> int:
    import pyarrow.parquet as pq

    first, num = next(tables), 0
    with pq.ParquetWriter(path, first.schema, compression="zstd") as writer:
        for table in chain([first], tables):
            writer.write_table(table)
            num += table.num_rows
    return num


def _write_json_lines(path: Path, tables: Iterator[pa.Table]) -> int:
    num = 0
    with open(path, "w", encoding="utf-8") as file:
        for table in tables:
            for row in table.to_pylist():
                if "columns" in row:
                    row["columns"] = json.loads(row["columns"] or "{}")
                file.write(json.dumps(_finite(row), ensure_ascii=False, allow_nan=False) + "\n")
            num += table.num_rows
    return num


def _finite(value: Any) -> Any:
    """NaN, which stands for unknown, becomes null: JSON has no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list) else value
