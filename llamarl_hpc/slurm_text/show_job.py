"""What `scontrol show job` prints: one record of `Key=Value` words for each component."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import zip_longest

from llamarl_hpc.slurm_text.job_id import JobId, parse_job_id

_KEY = re.compile(r"(?:^|\s)([A-Z][A-Za-z_/:]*)=")
# free text, which may hold blanks and signs of equality: all there is up to the end of the line
_TEXTS = {"JobName", "Command", "WorkDir", "StdErr", "StdIn", "StdOut", "Comment", "AdminComment"}
_NOTHING = ("(null)", "N/A", "None", "Unknown")


def parse_job_records(text: str) -> Iterator[tuple[JobId, dict[str, str]]]:
    """(id, values) of each record. Slurm up to 19.05 says Pack where later ones say Het; what has
    no value is left out."""
    for record in re.split(r"\n\s*\n", text):
        values: dict[str, str] = {}
        for line in record.splitlines():
            for key, value in _words(line):
                if value and value not in _NOTHING:
                    values.setdefault(key, value)
        if job := _id_of(values):
            yield job, values


def _words(line: str) -> Iterator[tuple[str, str]]:
    keys = list(_KEY.finditer(line))
    for key, following in zip_longest(keys, keys[1:]):
        if key[1] in _TEXTS:
            yield key[1], line[key.end() :].strip()
            return
        yield key[1], line[key.end() : following.start() if following else None].strip()


def _id_of(values: dict[str, str]) -> JobId | None:
    leader = values.get("HetJobId") or values.get("PackJobId")
    offset = values.get("HetJobOffset") or values.get("PackJobOffset")
    if leader and offset and "ArrayJobId" not in values:
        return parse_job_id(f"{leader}+{offset}")
    return None if "ArrayJobId" in values else parse_job_id(values.get("JobId", ""))
