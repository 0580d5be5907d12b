"""Held-out accuracy: an evaluation asks every held-out prompt under one policy version.

It shares the generators with training: its groups go first, training goes on beside it, and newer
weights are held back until it has all its answers.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Mapping, Sequence

import numpy as np

from llamarl_hpc.batching.buffer import ScoredGroup
from llamarl_hpc.config.schema import Config
from llamarl_hpc.controller.schedule import Replica
from llamarl_hpc.types import Prompt

log = logging.getLogger(__name__)
_CORRECT = 0.5  # a reward component above this counts as a right answer


class Evaluation:
    """Group numbers first_id .. first_id + len(prompts) - 1; only replicas at `version` count."""

    def __init__(
        self, version: int, prompts: Sequence[Prompt], *, first_id: int, component: str
    ) -> None:
        self.version, self.first_id, self.component = version, first_id, component
        self.t_start = time.time()
        self._prompts = prompts
        self._waiting = list(range(first_id, first_id + len(prompts)))
        self._results: dict[int, list[bool]] = {}  # group -> right or wrong, per completion
        self._lengths: list[int] = []

    def prompt_of(self, number: int) -> Prompt:
        return self._prompts[number - self.first_id]

    @property
    def next_id(self) -> int:
        """First group number that this evaluation does not use."""
        return self.first_id + len(self._prompts)

    def assign(self, replicas: Sequence[Replica]) -> list[tuple[str, int]]:
        """(replica, number) for everything that has not been sent out, spread evenly."""
        able = sorted(r.name for r in replicas if r.version == self.version)
        if not able:
            return []
        numbers, self._waiting = sorted(self._waiting), []
        return [(able[k % len(able)], number) for k, number in enumerate(numbers)]

    def owns(self, number: int) -> bool:
        """Whether this group number is one of its own, and not of one that was given up."""
        return self.first_id <= number < self.next_id

    def give_back(self, number: int) -> None:
        """The replica that had it is gone."""
        if self.owns(number):
            heapq.heappush(self._waiting, number)

    def add(self, group: ScoredGroup) -> None:
        values = group.rewards.get(self.component) or group.reward
        self._results[group.ticket] = [(value or 0.0) > _CORRECT for value in values]
        self._lengths += [len(c.token_ids) for c in group.completions]

    @property
    def is_complete(self) -> bool:
        return len(self._results) == len(self._prompts)

    def is_stuck(self, replicas: Sequence[Replica], trainer_version: int) -> bool:
        """Groups wait for weights that no replica holds or can still get."""
        return bool(
            self._waiting
            and trainer_version > self.version
            and not any(r.version == self.version for r in replicas if r.ready)
        )

    @property
    def accuracy(self) -> float:
        """Share of right answers, over prompts and completions."""
        return float(np.mean([np.mean(row) for row in self._results.values()]))

    def metrics(self) -> dict[str, float]:
        """avg@k and pass@k over the prompts, k = completions per prompt; counts for intervals."""
        rows = list(self._results.values())
        k = len(rows[0])
        prefix = "eval/heldout"
        return {
            f"{prefix}/avg@{k}": float(np.mean([np.mean(row) for row in rows])),
            f"{prefix}/pass@{k}": float(np.mean([any(row) for row in rows])),
            f"{prefix}/num_prompts": len(rows),
            f"{prefix}/num_correct": float(np.sum([np.mean(row) for row in rows])),
            f"{prefix}/mean_length": float(np.mean(self._lengths)),
            f"{prefix}/seconds": time.time() - self.t_start,
        }


class HeldOut:
    """Starts evaluations, knows the one under way, keeps what the finished ones found."""

    def __init__(
        self, config: Config, prompts: Sequence[Prompt], replicas: Mapping[str, Replica]
    ) -> None:
        self._prompts, self._replicas = prompts, replicas
        rewards = config.rewards
        verifiable = next((r for r in rewards if r.kind == "math_answer"), rewards[0])
        self._component = verifiable.name or ""
        self.current: Evaluation | None = None
        self.results: list[tuple[int, float]] = []  # (policy version, accuracy), oldest first

    def begin(self, version: int, first_id: int) -> int:
        """Evaluate `version`; returns the first group id that is free afterwards."""
        if not self._prompts:
            return first_id
        if self.current is not None:
            log.warning("an evaluation is under way; the one of version %d is left out", version)
            return first_id
        self.current = Evaluation(
            version, self._prompts, first_id=first_id, component=self._component
        )
        return self.current.next_id

    def was_measured(self, version: int) -> bool:
        return not self._prompts or any(v == version for v, _ in self.results)

    def holds_back(self, trainer_version: int) -> bool:
        """The evaluation under way still needs weights that are older than the trainer's."""
        return self.current is not None and trainer_version > self.current.version

    def is_over(self, trainer_version: int) -> bool:
        """The evaluation under way is complete, or cannot be completed any more."""
        return self.current is not None and (
            self.current.is_complete
            or self.current.is_stuck(list(self._replicas.values()), trainer_version)
        )

    def settle(self, trainer_version: int) -> tuple[int, dict[str, float]] | None:
        """(version, metrics) of the evaluation that has just become complete; else None."""
        if not self.is_over(trainer_version) or self.current is None:
            return None
        evaluation, self.current = self.current, None
        if not evaluation.is_complete:
            log.warning("evaluation of version %d given up: no replica has it", evaluation.version)
            return None
        metrics = evaluation.metrics()
        self.results.append((evaluation.version, evaluation.accuracy))
        return evaluation.version, metrics
