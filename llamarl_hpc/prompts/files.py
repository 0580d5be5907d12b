"""Questions from a file: JSONL, parquet, or the folder of a saved Hugging Face data set.

Every refusal names the file and the line (or row) and says what was wanted. Nothing is cut or
guessed: a row that cannot be used ends the load, a prompt that is too long is dataset.py's matter.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.prompts.rows import Row

_Located = tuple[str, dict[str, Any]]  # where, row
_HALF = re.compile(r"[\ud800-\udfff]")  # JSON can write half of a surrogate pair, UTF-8 cannot


def read_rows(path: Path, *, prompt: str | list[str], answer: str | None) -> list[Row]:
    """All rows of `path`, in order. `answer` None: no reference answer is needed.

    Raises ConfigError: missing file or column, broken line, empty question, no rows.
    """
    prompts = [prompt] if isinstance(prompt, str) else prompt
    rows = [
        Row(
            question=" ".join(_text(row, column, where) for column in prompts),
            columns=_checked(row, answer, where),
            where=where,
        )
        for where, row in _read(path)
    ]
    if not rows:
        raise ConfigError(f"{path} has no rows; wanted at least one question")
    return rows


def _read(path: Path) -> Iterator[_Located]:
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        raise ConfigError(f"the data file {path} does not exist; check data.path{_near(path)}")
    if path.suffix in (".jsonl", ".ndjson"):
        return _read_jsonl(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    raise ConfigError(
        f"{path}: cannot tell the form of a '{path.suffix}' file; wanted .jsonl, .parquet or the "
        "folder of a saved Hugging Face data set"
    )


def _near(path: Path) -> str:
    try:
        names = [p.name for p in path.parent.iterdir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=1)
    return f" (did you mean '{path.with_name(close[0])}'?)" if close else ""


# ------------------------------------------------------------------------------ one row


def _column(row: dict[str, Any], column: str, where: str) -> Any:
    if column in row:
        return row[column]
    close = difflib.get_close_matches(column, row, n=1)
    hint = f"did you mean '{close[0]}'?" if close else "set data.prompt and data.answer"
    raise ConfigError(f"{where}: no column '{column}'; it has {', '.join(row)}; {hint}")


def _text(row: dict[str, Any], column: str, where: str) -> str:
    value = _column(row, column, where)
    if not isinstance(value, str):
        raise ConfigError(f"{where}: column '{column}' wanted text, found {type(value).__name__}")
    if not value.strip():
        raise ConfigError(f"{where}: column '{column}' is empty; wanted a question")
    return value.strip()


def _checked(row: dict[str, Any], answer: str | None, where: str) -> dict[str, Any]:
    if answer is not None:
        value = _column(row, answer, where)
        blank = value is None or value != value  # NaN is how tables write "nothing"
        if blank or (isinstance(value, str) and not value.strip()):
            raise ConfigError(f"{where}: column '{answer}' is empty; wanted the reference answer")
    for column, value in row.items():
        _check_value(value, f"{where}: column '{column}'")
    return row


def _check_value(value: Any, where: str) -> None:
    """Every column goes to the reward executor in a message: refuse what cannot be in one."""
    try:
        msgspec.msgpack.encode(value)
    except OverflowError as error:
        raise ConfigError(f"{where} has a number above 64 bits; write it as text") from error
    except (TypeError, ValueError, RecursionError) as error:
        problem = str(error).splitlines()[0]
        raise ConfigError(f"{where} cannot reach the reward functions ({problem})") from error


# ------------------------------------------------------------------------------ JSONL


def _read_jsonl(path: Path) -> Iterator[_Located]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                where = f"{path} line {number}"
                text = _utf8(line, where)
                if text.strip():
                    yield where, _decode(text, where)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _utf8(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8-sig" if where.endswith(" line 1") else "utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8 ({error.reason}); convert the file") from error


def _decode(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except RecursionError as error:
        raise ConfigError(f"{where}: nested too deeply; mend it") from error
    except ValueError as error:
        problem = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        column = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigError(f"{where}: not valid JSON ({problem}{column}); mend it") from error
    if not isinstance(row, dict):
        raise ConfigError(
            f'{where}: wanted an object with columns such as {{"question": ...}}, found '
            f"{type(row).__name__}"
        )
    if "\\ud" in line.lower() and _HALF.search(json.dumps(row, ensure_ascii=False)):
        raise ConfigError(f"{where}: half a character (a lone \\ud800 to \\udfff); mend it")
    return row


# ------------------------------------------------------------------------------ Arrow


def _read_folder(path: Path) -> Iterator[_Located]:
    """`save_to_disk` (state.json, or dataset_dict.json with a folder per split), or parquet."""
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        split = splits[0] if len(splits) == 1 else "train"
        if split not in splits:
            raise ConfigError(
                f"{path} has the splits {', '.join(splits)}; set the path to one of their folders"
            )
        return _read_folder(path / split)
    if (path / "state.json").is_file():
        return _read_saved(path)
    files = sorted(path.glob("*.parquet")) or sorted(path.glob("data/*.parquet"))
    train = [file for file in files if file.name.startswith("train")]
    if not files:
        raise ConfigError(
            f"{path} is a folder without a saved data set (no state.json, dataset_dict.json or "
            "*.parquet); give a file, or a folder that datasets' save_to_disk wrote"
        )
    return (located for file in train or files for located in _read_parquet(file))


def _read_saved(folder: Path) -> Iterator[_Located]:
    arrow = _pyarrow(folder)
    names = [
        item["filename"] for item in json.loads((folder / "state.json").read_text())["_data_files"]
    ]
    first = 0
    for name in names:
        try:
            with arrow.memory_map(str(folder / name)) as source:
                table = arrow.ipc.open_stream(source).read_all()
        except (OSError, arrow.ArrowInvalid) as error:
            raise ConfigError(f"cannot read {folder / name}: {error}") from error
        yield from _table_rows(table, folder, first)
        first += table.num_rows


def _read_parquet(path: Path) -> Iterator[_Located]:
    arrow = _pyarrow(path)
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, arrow.ArrowInvalid) as error:
        raise ConfigError(f"{path} is not a readable parquet file: {error}") from error
    yield from _table_rows(table, path, 0)


def _table_rows(table: Any, path: Path, first: int) -> Iterator[_Located]:
    for number, row in enumerate(_plain(table).to_pylist(), start=first + 1):
        yield f"{path} row {number}", row


def _plain(table: Any) -> Any:
    """With times in microseconds: finer ones become objects of pandas."""
    import pyarrow

    for place, field in enumerate(table.schema):
        if pyarrow.types.is_timestamp(field.type) and field.type.unit == "ns":
            coarser = pyarrow.timestamp("us", tz=field.type.tz)
        elif pyarrow.types.is_duration(field.type) and field.type.unit == "ns":
            coarser = pyarrow.duration("us")
        else:
            continue
        table = table.set_column(place, field.name, table[place].cast(coarser, safe=False))
    return table


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise ConfigError(
            f"{path} needs pyarrow; install it (pip install pyarrow) or convert to JSONL"
        ) from error
    return pyarrow
