"""Generated questions: a weighted mix of reasoning-gym tasks (the only door to reasoning_gym).

A seed fixes an endless stream. Held-out questions come from a stream of another seed and never
appear in training; where a task has few distinct questions (one-digit sums: about a hundred),
at least half of them are left for training.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import random
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Any

from llamarl_hpc.config.schema import DataConfig, TaskConfig
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.prompts.rows import METADATA, TASK, Row, question_column

_CHUNK = 1024  # questions per reasoning-gym data set; some of them limit their size
_MAX_REPEATS = 10_000  # draws in a row without a usable question, after which we give up


def training_and_heldout(
    data: DataConfig, *, num_heldout: int, heldout_seed: int
) -> tuple[list[Row], list[Row]]:
    """`data.size` training rows, repeats included, and up to `num_heldout` distinct others."""
    first = list(islice(_mix(data, data.seed), data.size)) if num_heldout else []
    heldout = _heldout(data, first, num_heldout, heldout_seed)
    taken = {row.question for row in heldout}
    return list(islice(_mix(data, data.seed, taken), data.size)), heldout


def _heldout(data: DataConfig, training: Sequence[Row], number: int, seed: int) -> list[Row]:
    """Distinct questions of another seed, at most half of the distinct ones of each task."""
    known: dict[str, set[str]] = {}
    for row in training:
        known.setdefault(_task_key(row), set()).add(row.question)
    chosen: dict[str, Row] = {}
    held: dict[str, int] = {}
    fruitless = 0
    for row in _mix(data, seed):
        if len(chosen) == number or fruitless >= 10 * number + 1000:
            break
        task = _task_key(row)
        known.setdefault(task, set()).add(row.question)
        if row.question in chosen or held.get(task, 0) >= len(known[task]) // 2:
            fruitless += 1
            continue
        chosen[row.question] = row
        held[task] = held.get(task, 0) + 1
    return list(chosen.values())


def _task_key(row: Row) -> str:
    return row.where


# ------------------------------------------------------------------------------ the stream


def _mix(data: DataConfig, seed: int, excluded: Collection[str] = ()) -> Iterator[Row]:
    """Endless. The task of each position is drawn by weight; excluded questions are drawn again."""
    streams = [
        _Stream(task, f"data.tasks.{index}", _derive(seed, index), data)
        for index, task in enumerate(data.tasks)
    ]
    draw = random.Random(_derive(seed, -1)).random
    total = sum(task.weight for task in data.tasks)
    while True:
        point = draw() * total
        index = 0
        while index < len(streams) - 1 and point >= data.tasks[index].weight:
            point -= data.tasks[index].weight
            index += 1
        yield streams[index].next_outside(excluded)


class _Stream:
    """One task's questions, by position."""

    def __init__(self, task: TaskConfig, key: str, seed: int, data: DataConfig) -> None:
        self.task, self.key, self.seed, self.data = task, key, seed, data
        self.position = 0
        self.chunk: Any = _create(task, key, seed)

    def next_outside(self, excluded: Collection[str]) -> Row:
        for _ in range(_MAX_REPEATS):
            row = self._next()
            if row.question not in excluded:
                return row
        raise ConfigError(
            f"{self.key} ({self.task.name}) gave no question outside the held-out ones in "
            f"{_MAX_REPEATS} draws; lower evaluation.num_prompts or widen {self.key}.params"
        )

    def _next(self) -> Row:
        chunk, index = divmod(self.position, _CHUNK)
        if index == 0 and chunk:
            self.chunk = _create(self.task, self.key, self.seed + chunk * _CHUNK)
        self.position += 1
        item = self.chunk[index]
        question = str(item["question"]).strip()
        return Row(
            question=question,
            columns={
                question_column(self.data.prompt): question,
                self.data.answer: str(item["answer"]),
                TASK: self.task.name,
                METADATA: json.loads(json.dumps(item.get("metadata", {}), default=str)),
            },
            where=f"{self.key} ({self.task.name})",
        )


def _create(task: TaskConfig, key: str, seed: int) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            "data.tasks needs reasoning-gym; install it (pip install reasoning-gym) or set "
            "data.path"
        ) from error
    if task.name not in DATASETS:
        near = difflib.get_close_matches(task.name, DATASETS, n=3) or sorted(DATASETS)
        raise ConfigError(f"{key}.name: no task '{task.name}'; there is {', '.join(near)}")
    try:
        return reasoning_gym.create_dataset(task.name, size=_CHUNK, seed=seed, **task.params)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"{key}.params for '{task.name}': {error}") from error


def _derive(seed: int, index: int) -> int:
    """A seed of its own for each task and purpose, so that equal tasks do not run in step."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 2  # room to count upwards within 32 bits
