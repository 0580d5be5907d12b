"""Format 1 of the rollout store: its tables and columns, as data. No HDF5 and no I/O here.

A file is a set of tables. A table is an HDF5 group whose datasets all have one row per entry
(1-D, equal lengths). Ragged things are a pair of columns `x_offset`, `x_length` that point into a
flat table. Columns with `refers` hold row numbers of another table of the same file.

The same block of columns (`Block`) is what a file holds, what the writer collects, and what
joining several files gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llamarl_hpc.types import Array, FinishReason, Purpose, Status

FORMAT = "llamarl_hpc rollouts"
FORMAT_VERSION = 1  # a reader refuses files with a higher number
FORMAT_MINOR = 2  # rises when something is added; older readers pass over it
ALL_CHECKED = 2  # from this minor on every column and attribute has a checksum

Block = dict[str, Array]
"""Columns by path, `"rollouts/reward"`. Strings are fixed-width bytes (UTF-8)."""

ENUMS: dict[str, dict[str, int]] = {
    "purpose": {Purpose.TRAIN.value: 0, Purpose.EVAL.value: 1},
    "status": {
        Status.TRAINED.value: 0,
        Status.DROPPED.value: 1,
        Status.ABANDONED.value: 2,
        Status.EVALUATION.value: 3,
    },
    "finish_reason": {
        FinishReason.STOP.value: 0,
        FinishReason.LENGTH.value: 1,
        FinishReason.ABORTED.value: 2,
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One dataset."""

    path: str  # "table/name"
    dtype: str  # numpy code; "S" is a fixed-width string, wide enough for the longest
    meaning: str
    unit: str = ""
    refers: str = ""  # the table whose rows it counts; shifted when files are joined
    optional: bool = False  # only in files of runs that need it; else it reads as unknown

    @property
    def table(self) -> str:
        return self.path.split("/")[0]

    @property
    def name(self) -> str:
        return self.path.split("/")[1]

    @property
    def enum(self) -> dict[str, int] | None:
        """Names and codes, for a column that is an enumeration."""
        return ENUMS.get(self.name) if self.dtype == "u1" else None


def _columns(table: str, *rows: tuple[str, str, str, str] | tuple[str, str, str, str, str]) -> None:
    for name, dtype, unit, meaning, *refers in rows:
        path = f"{table}/{name}"
        COLUMNS[path] = Column(
            path=path,
            dtype=dtype,
            unit=unit,
            meaning=meaning,
            refers=refers[0] if refers else "",
            optional=path in _OPTIONAL,
        )


_OPTIONAL = {"tokens/entropy", "tokens/logprob_reference"}

COLUMNS: dict[str, Column] = {}
"""Every column of format 1 except `rewards/<name>`, which depend on the run."""

_columns(
    "groups",
    ("purpose", "u1", "", "what the group was generated for"),
    ("group_id", "i8", "", "dense within purpose; the same when a later attempt issues it again"),
    ("attempt", "i4", "", "attempt of the run that resolved it, from 1"),
    ("issue", "i4", "", "how often it had been handed to a generator, from 1"),
    ("status", "u1", "", "what became of it"),
    ("reason", "i4", "row", "why dropped or abandoned; the empty text otherwise", "reasons"),
    (
        "step",
        "i8",
        "step",
        "optimizer step that consumed it, from 0; evaluation: policy version; else -1",
    ),
    ("prompt", "i8", "row", "its prompt", "prompts"),
    ("generator", "i4", "row", "replica that produced it", "generators"),
    (
        "staleness",
        "i4",
        "step",
        "policy version at consumption minus the oldest version in it; -1 if not consumed",
    ),
    ("first_rollout", "i8", "row", "its completions are the next num_rollouts rows", "rollouts"),
    ("num_rollouts", "i4", "", "its completions; 0 when none came back"),
    ("t_issued", "f8", "s", "Unix time at which it was first handed to a generator"),
    ("t_resolved", "f8", "s", "Unix time at which its fate was known"),
)
_columns(
    "rollouts",
    ("rollout_id", "i8", "", "unique in the run: attempt * 2**32 + running number"),
    ("group", "i8", "row", "its group", "groups"),
    ("group_id", "i8", "", "as in groups"),
    ("purpose", "u1", "", "as in groups"),
    ("status", "u1", "", "as in groups"),
    ("attempt", "i4", "", "as in groups"),
    ("step", "i8", "step", "as in groups"),
    ("prompt", "i8", "row", "as in groups", "prompts"),
    ("generator", "i4", "row", "as in groups", "generators"),
    ("version_min", "i8", "", "oldest policy version that sampled a token of it"),
    ("version_max", "i8", "", "newest policy version that sampled a token of it"),
    ("staleness", "i4", "step", "trainer version at consumption minus version_min; else -1"),
    ("reward", "f8", "", "weighted sum of the components; NaN if never scored"),
    ("advantage", "f8", "", "what the loss multiplied with; 0 or NaN if it was not trained"),
    ("finish_reason", "u1", "", "why the completion ended"),
    ("temperature", "f4", "", "it was sampled with"),
    ("completion_length", "i4", "token", "tokens, the end-of-sequence token included"),
    ("token_offset", "i8", "row", "first row in tokens", "tokens"),
    ("text_length", "i4", "byte", "UTF-8 bytes of the text"),
    ("text_offset", "i8", "row", "first row in text", "text"),
    ("t_start", "f8", "s", "Unix time at which the prompt entered the engine's batch"),
    ("t_end", "f8", "s", "Unix time of the last token"),
)
_columns(
    "tokens",
    ("id", "i4", "", "token id"),
    ("logprob_behaviour", "f4", "nat", "log-probability under the distribution it was drawn from"),
    ("logprob_trainer", "f4", "nat", "the trainer's when it consumed it; NaN if not trained"),
    ("loss_mask", "u1", "", "1 where the loss counts it"),
    ("entropy", "f4", "nat", "the trainer's; only with `algorithm.entropy_coef`"),
    ("logprob_reference", "f4", "nat", "the reference policy's; only with `algorithm.beta`"),
)
_columns(
    "versions",
    ("rollout", "i8", "row", "the rollout whose tokens start..end (end excluded)", "rollouts"),
    ("start", "i4", "token", "first token of the span"),
    ("end", "i4", "token", "one past the last token"),
    ("version", "i8", "", "the policy version that sampled them"),
)
_columns("text", ("utf8", "u1", "byte", "texts of all completions, special tokens left out"))
_columns(
    "prompts",
    ("prompt_id", "S", "", "hash of text and answer columns; equal content, equal id"),
    ("epoch", "i4", "", "how often the data set had been gone through before"),
    ("token_length", "i4", "token", "tokens the model is shown"),
    ("token_offset", "i8", "row", "first row in prompt_tokens", "prompt_tokens"),
    ("text_length", "i4", "byte", "UTF-8 bytes of the text as shown, special tokens included"),
    ("text_offset", "i8", "row", "first row in prompt_text", "prompt_text"),
    ("columns_length", "i4", "byte", "UTF-8 bytes of the data row as JSON"),
    ("columns_offset", "i8", "row", "first row in prompt_columns", "prompt_columns"),
)
_columns("prompt_tokens", ("id", "i4", "", "token id"))
_columns("prompt_text", ("utf8", "u1", "byte", "texts of all prompts"))
_columns("prompt_columns", ("utf8", "u1", "byte", "data rows of all prompts, JSON objects"))
_columns("generators", ("name", "S", "", "name of a replica"))
_columns("reasons", ("text", "S", "", "why a group was dropped or abandoned"))

TABLES: tuple[str, ...] = tuple(dict.fromkeys(column.table for column in COLUMNS.values()))


def reward_column(name: str) -> Column:
    """The column of one reward component; its row is the rollout's. `/` cannot be in a name."""
    return Column(
        path=f"rewards/{name.replace('/', '.')}",
        dtype="f8",
        meaning="score of this component; NaN where it does not apply",
    )


def column_of(path: str) -> Column:
    """The column at a path, reward components included. Raises KeyError."""
    if path.startswith("rewards/"):
        return reward_column(path.removeprefix("rewards/"))
    return COLUMNS[path]


def empty_column(column: Column, length: int = 0) -> Array:
    """What stands where nothing is known: NaN for numbers with a fraction, else 0."""
    if column.dtype == "S":
        return np.zeros(length, dtype="S1")
    fill = np.nan if column.dtype.startswith("f") else 0
    return np.full(length, fill, dtype=column.dtype)


def describe() -> str:
    """The tables of the format as Markdown; `docs/rollout-format.md` holds this text."""
    lines: list[str] = []
    for table in TABLES:
        lines += [f"### /{table}", "", "| column | type | unit | meaning |", "|---|---|---|---|"]
        for column in COLUMNS.values():
            if column.table == table:
                unit = f"row of {column.refers}" if column.refers else column.unit
                lines.append(f"| `{column.name}` | {_type(column)} | {unit} | {column.meaning} |")
        lines.append("")
    return "\n".join(lines)


def _type(column: Column) -> str:
    if column.enum:
        return "enum8: " + ", ".join(f"{code} {name}" for name, code in column.enum.items())
    kinds = {"i": "int", "u": "uint", "f": "float"}
    if column.dtype == "S":
        return "UTF-8, fixed width"
    return f"{kinds[column.dtype[0]]}{8 * int(column.dtype[1:])}"
