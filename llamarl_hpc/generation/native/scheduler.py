"""Continuous batching as bookkeeping: which groups run, in which slots, and when they are done.

No tensors here. Groups start in the order they came, whole groups only, as soon as enough slots
are free and the step's budget of prompt tokens allows. Running sequences always hold slots
0..B-1: when one ends, the last one moves into its slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.types import Array, FinishReason, GenerationRequest, Purpose, VersionSpan

# (request, completion index) -> the uniform numbers of that completion
DrawFunction = Callable[[GenerationRequest, int], Array]


@dataclass(kw_only=True, slots=True, eq=False)
class RunningSequence:
    """One completion in the making."""

    group: RunningGroup
    index: int  # within the group
    slot: int
    draws: Array  # float32 [max_tokens], one uniform number per token
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    t_start: float
    t_end: float = 0.0

    @property
    def length(self) -> int:
        """Tokens of prompt and completion so far."""
        return len(self.group.request.prompt_ids) + len(self.token_ids)

    def append(self, token_id: int, logprob: float, version: int, now: float) -> None:
        position = len(self.token_ids)
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if self.versions and self.versions[-1].version == version:
            start = self.versions.pop().start
        else:
            start = position
        self.versions.append(VersionSpan(start, position + 1, version))
        self.t_end = now


@dataclass(kw_only=True, slots=True, eq=False)
class RunningGroup:
    """A request and its completions; waits while `sequences` is empty."""

    request: GenerationRequest
    sequences: list[RunningSequence] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return all(sequence.finish_reason for sequence in self.sequences)


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """The contents of slot `source`, `length` tokens, belong into slot `target` from now on."""

    source: int
    target: int
    length: int


class Scheduler:
    """See the module. `running[i]` holds slot i."""

    def __init__(self, *, max_concurrency: int, prefill_tokens: int, max_context: int) -> None:
        self._max_concurrency = max_concurrency
        self._prefill_tokens = prefill_tokens
        self._max_context = max_context
        self._waiting: deque[RunningGroup] = deque()
        self.running: list[RunningSequence] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a group that `check` accepts."""
        self._waiting.append(RunningGroup(request=request))

    def check(self, request: GenerationRequest) -> None:
        """Raises ConfigError when the group can never run."""
        prompt, tokens = len(request.prompt_ids), request.sampling.max_tokens
        if prompt < 1 or tokens < 1 or request.num_generations < 1:
            raise ConfigError(
                f"group {request.group_id} asks for {request.num_generations} completions of "
                f"{tokens} tokens to a prompt of {prompt}; each must be at least 1"
            )
        if prompt + tokens > self._max_context:
            raise ConfigError(
                f"the prompt of group {request.group_id} has {prompt} tokens, which with up to "
                f"{tokens} of the completion exceed the context of {self._max_context}; leave out "
                "such prompts (rollout.max_prompt_length) or lower rollout.max_completion_length"
            )
        if request.num_generations > self._max_concurrency:
            raise ConfigError(
                f"group {request.group_id} has {request.num_generations} completions, but "
                f"generator.max_concurrency is {self._max_concurrency} and a group starts whole; "
                "raise generator.max_concurrency"
            )

    def admit(self, draws: DrawFunction, now: float) -> list[RunningGroup]:
        """Start the groups whose turn it is; they get the slots after the running ones.

        One group is admitted whatever its prompt's length, so a long prompt cannot wait forever.
        """
        admitted: list[RunningGroup] = []
        budget = self._prefill_tokens
        while self._waiting:
            request = self._waiting[0].request
            free = self._max_concurrency - len(self.running)
            fits = len(request.prompt_ids) <= budget or not admitted
            if request.num_generations > free or not fits:
                break
            group = self._waiting.popleft()
            budget -= len(request.prompt_ids)
            for index in range(request.num_generations):
                sequence = RunningSequence(
                    group=group,
                    index=index,
                    slot=len(self.running),
                    draws=draws(request, index),
                    t_start=now,
                )
                group.sequences.append(sequence)
                self.running.append(sequence)
            admitted.append(group)
        return admitted

    def record(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        *,
        version: int,
        stop_ids: Collection[int],
        now: float,
    ) -> tuple[list[RunningGroup], list[Move]]:
        """Append one token to every running sequence, in slot order; retire those that end.

        Returns the groups that are complete by it, and the slot moves that keep slots dense.
        """
        ended: list[RunningSequence] = []
        for sequence, token_id, logprob in zip(self.running, token_ids, logprobs, strict=True):
            sequence.append(token_id, logprob, version, now)
            if token_id in stop_ids:
                sequence.finish_reason = FinishReason.STOP
            elif len(sequence.token_ids) == sequence.group.request.sampling.max_tokens:
                sequence.finish_reason = FinishReason.LENGTH
            else:
                continue
            ended.append(sequence)
        groups = {id(s.group): s.group for s in ended if s.group.is_complete}
        return list(groups.values()), self._compact(len(self.running) - len(ended))

    def abort_all(self) -> list[tuple[Purpose, int]]:
        """Forget every group, running ones first; returns their (purpose, group id)."""
        groups = list({id(s.group): s.group for s in self.running}.values())
        groups += self._waiting
        self.running.clear()
        self._waiting.clear()
        return [(group.request.purpose, group.request.group_id) for group in groups]

    def _compact(self, remaining: int) -> list[Move]:
        """Close the holes that ended sequences leave, from the end; each slot moves once."""
        moves: list[Move] = []
        late = [s for s in self.running[remaining:] if s.finish_reason is None]
        for slot in range(remaining):
            if self.running[slot].finish_reason is None:
                continue
            sequence = late.pop()
            # the newest token has no keys and values yet
            moves.append(Move(source=sequence.slot, target=slot, length=sequence.length - 1))
            sequence.slot = slot
            self.running[slot] = sequence
        del self.running[remaining:]
        return moves
