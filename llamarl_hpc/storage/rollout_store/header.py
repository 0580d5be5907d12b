"""What a file of the store says of itself in its attributes, before it is believed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llamarl_hpc.errors import StoreError
from llamarl_hpc.storage.rollout_store import checksums
from llamarl_hpc.storage.rollout_store.layout import ALL_CHECKED, FORMAT, FORMAT_VERSION, TABLES


class NewerFormatError(StoreError):
    """A file that only a newer version can read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The attributes of one file and what they mean."""

    attributes: dict[str, Any]  # texts and numbers
    rows: dict[str, int]  # of every table
    first_rollout_id: int  # -1: it has no rollouts
    checksums: dict[str, str]  # by column
    all_checked: bool  # every column has a checksum; in older files only some

    @classmethod
    def of(
        cls, name: str, attributes: dict[str, Any], *, rows: dict[str, int] | None = None
    ) -> Header:
        """The header of the file with this name.

        Raises NewerFormatError, or ValueError with a sentence when attributes make no sense or are
        not those that were written. With `rows` they are believed all the same.
        """
        _check_version(name, attributes)
        all_checked = _number(name, attributes, "format_minor") >= ALL_CHECKED
        header = cls(
            attributes=attributes,
            rows=_table_rows(name, attributes) if rows is None else rows,
            first_rollout_id=_number(name, attributes, "first_rollout_id"),
            checksums=checksums.parsed(str(attributes.get(checksums.ATTRIBUTE, ""))),
            all_checked=all_checked,
        )
        if all_checked and rows is None and not checksums.are_as_written(attributes):
            raise ValueError(f"{name} is damaged: the checksum of its attributes is wrong")
        return header


def _check_version(name: str, attributes: dict[str, Any]) -> None:
    if attributes.get("format") != FORMAT:
        raise ValueError(f"{name} is not a file of the rollout store")
    version = _number(name, attributes, "format_version")
    if version > FORMAT_VERSION:
        raise NewerFormatError(
            f"{name} has format {version}; this version of llamarl-hpc reads up to "
            f"{FORMAT_VERSION}, so install a newer one"
        )


def _number(name: str, attributes: dict[str, Any], key: str) -> int:
    value = attributes.get(key)
    try:
        return int(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} is damaged: its attribute {key} is {value!r}") from None


def _table_rows(name: str, attributes: dict[str, Any]) -> dict[str, int]:
    text = attributes.get("table_rows")
    try:
        pairs = (entry.rsplit("=", 1) for entry in str(text).split())
        rows = {table: int(number) for table, number in pairs}
    except ValueError:
        rows = {}
    if not rows.keys() >= set(TABLES) or min(rows.values()) < 0:
        raise ValueError(f"{name} is damaged: its attribute table_rows is {text!r}")
    return rows
