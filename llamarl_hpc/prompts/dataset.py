"""Prompts of a run: read or generated, split into training and held-out, rendered, tokenised.

    rows (files.py | tasks.py) -> held-out apart -> template.py -> too long left out -> PromptSet

Training keeps the rows as they are, repeats included; held-out questions are distinct and none
of them is asked in training.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llamarl_hpc.config.schema import Config
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.prompts import tasks
from llamarl_hpc.prompts.files import read_rows
from llamarl_hpc.prompts.rows import Row
from llamarl_hpc.prompts.template import Renderer
from llamarl_hpc.types import Prompt

_MAX_EXAMPLES = 5


class PromptSet:
    """An ordered, immutable set of prompts (repeats possible, with equal ids)."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = tuple(prompts)
        ids = "\n".join(prompt.prompt_id for prompt in self._prompts)
        # of the ids in order: equal if and only if a position means the same prompt
        self.fingerprint = hashlib.blake2b(ids.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]

    @property
    def num_distinct(self) -> int:
        return len({prompt.prompt_id for prompt in self._prompts})


@dataclass(frozen=True, kw_only=True)
class SkipReport:
    """What was left out, and the sizes of what was kept."""

    max_prompt_length: int
    num_rows: int  # of training and held-out data before anything was left out
    num_too_long: int = 0
    too_long: list[str] = field(default_factory=list)  # the first few: where and how long
    num_also_heldout: int = 0  # training rows left out because the held-out file asks them too
    num_train: int
    num_train_distinct: int
    num_heldout: int
    num_heldout_wanted: int

    def sentences(self) -> list[str]:
        """For the log: sizes first, then one line per kind of loss."""
        lines = [
            f"{self.num_train} training prompts ({self.num_train_distinct} distinct), "
            f"{self.num_heldout} held-out prompts"
        ]
        if self.num_too_long:
            more = ", ..." if self.num_too_long > len(self.too_long) else ""
            lines.append(
                f"{self.num_too_long} of {self.num_rows} prompts left out: longer than "
                f"rollout.max_prompt_length {self.max_prompt_length} "
                f"({', '.join(self.too_long)}{more})"
            )
        if self.num_also_heldout:
            lines.append(
                f"{self.num_also_heldout} training rows left out: data.eval_path asks them too"
            )
        if self.num_heldout < self.num_heldout_wanted:
            lines.append(
                f"evaluation.num_prompts is {self.num_heldout_wanted}, but only "
                f"{self.num_heldout} questions could be held out"
            )
        return lines


@dataclass(frozen=True, kw_only=True)
class PromptSets:
    train: PromptSet
    heldout: PromptSet  # empty when evaluation.num_prompts is 0
    skipped: SkipReport


def load_prompts(config: Config, tokenizer_folder: Path) -> PromptSets:
    """The training and held-out prompts of `config`, ready as token ids.

    `tokenizer_folder` is the model folder (tokenizer.json, chat template). Raises ConfigError
    when there is no usable prompt, and for everything that is wrong with the data.
    """
    loader = _Loader(config, Renderer(tokenizer_folder, config.data))
    train, heldout = loader.load()
    train_set, heldout_set = PromptSet(train), PromptSet(heldout)
    too_long = loader.too_long
    return PromptSets(
        train=train_set,
        heldout=heldout_set,
        skipped=SkipReport(
            max_prompt_length=config.rollout.max_prompt_length,
            num_rows=loader.num_rows,
            num_too_long=len(too_long),
            too_long=[f"{where}: {length} tokens" for where, length in too_long[:_MAX_EXAMPLES]],
            num_also_heldout=loader.num_also_heldout,
            num_train=len(train_set),
            num_train_distinct=train_set.num_distinct,
            num_heldout=len(heldout_set),
            num_heldout_wanted=config.evaluation.num_prompts,
        ),
    )


class _Loader:
    """One load: reads, renders, splits, and counts what it leaves out."""

    def __init__(self, config: Config, renderer: Renderer) -> None:
        self.config, self.renderer = config, renderer
        self.num_rows = 0
        self.too_long: list[tuple[str, int]] = []  # where, tokens
        self.num_also_heldout = 0

    def load(self) -> tuple[list[Prompt], list[Prompt]]:
        """Training prompts and held-out prompts."""
        data, number = self.config.data, self.config.evaluation.num_prompts
        if data.eval_path is not None:
            return self._with_heldout_file(data.eval_path)
        if data.path is None:
            training, others = tasks.training_and_heldout(
                data, num_heldout=number, heldout_seed=self.config.evaluation.seed
            )
            train, heldout = self._usable_training(training), self._usable(others)
        else:
            train = self._usable_training(_read(self.config, data.path))
            heldout = _choose(train, min(number, _num_distinct(train) // 2))
            train = _without(train, heldout)
        if number and not heldout:
            raise ConfigError(
                f"evaluation.num_prompts is {number} but the data have only one distinct "
                "question; set evaluation.num_prompts to 0 or give more data"
            )
        return train, heldout

    def _with_heldout_file(self, eval_path: str) -> tuple[list[Prompt], list[Prompt]]:
        data = self.config.data
        if data.path is None:
            rows, _ = tasks.training_and_heldout(data, num_heldout=0, heldout_seed=0)
        else:
            rows = _read(self.config, data.path)
        everything = self._usable_training(rows)
        others = self._usable(_read(self.config, eval_path))
        train = _without(everything, others)
        if not train:
            raise ConfigError(
                f"every question of {data.path} is also in data.eval_path {eval_path}, so none "
                "is left for training; give different files"
            )
        self.num_also_heldout = len(everything) - len(train)
        return train, _choose(others, self.config.evaluation.num_prompts)

    def _usable_training(self, rows: Sequence[Row]) -> list[Prompt]:
        prompts = self._usable(rows)
        if not prompts:
            shortest = min(length for _, length in self.too_long)
            raise ConfigError(
                f"all {len(rows)} training prompts are longer than rollout.max_prompt_length "
                f"{self.config.rollout.max_prompt_length} (the shortest has {shortest} tokens); "
                "raise it, as far as the model's context allows"
            )
        return prompts

    def _usable(self, rows: Sequence[Row]) -> list[Prompt]:
        """The prompts that are short enough, in order; the others are noted."""
        texts = self.renderer.render([row.question for row in rows])
        token_ids = self.renderer.tokenize(texts)
        self.num_rows += len(rows)
        prompts = []
        for row, text, ids in zip(rows, texts, token_ids, strict=True):
            if len(ids) > self.config.rollout.max_prompt_length:
                self.too_long.append((row.where, len(ids)))
                continue
            prompt_id = _prompt_id(text, row.columns.get(self.config.data.answer))
            prompts.append(
                Prompt(prompt_id=prompt_id, epoch=0, text=text, token_ids=ids, columns=row.columns)
            )
        return prompts


def _read(config: Config, path: str) -> list[Row]:
    needs_answer = any(reward.kind == "math_answer" for reward in config.rewards)
    answer = config.data.answer if needs_answer else None
    return read_rows(Path(path).expanduser(), prompt=config.data.prompt, answer=answer)


def _choose(prompts: Sequence[Prompt], number: int) -> list[Prompt]:
    """`number` distinct questions by content hash: the same ones in whatever order the file is."""
    distinct = {prompt.text: prompt for prompt in reversed(prompts)}
    order = sorted(distinct, key=lambda text: hashlib.blake2b(text.encode()).digest())
    return [distinct[text] for text in order[:number]]


def _without(prompts: Sequence[Prompt], others: Sequence[Prompt]) -> list[Prompt]:
    asked = {prompt.text for prompt in others}
    return [prompt for prompt in prompts if prompt.text not in asked]


def _num_distinct(prompts: Sequence[Prompt]) -> int:
    return len({prompt.text for prompt in prompts})


def _prompt_id(text: str, answer: object) -> str:
    content = json.dumps([text, answer], default=str)
    return hashlib.blake2b(content.encode(), digest_size=12).hexdigest()
