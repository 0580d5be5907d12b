"""Admission, slots and retirement, without a model."""

from __future__ import annotations

import numpy as np
import pytest
from engine_runs import request

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.generation.native.scheduler import Move, RunningGroup, Scheduler
from llamarl_hpc.types import Array, FinishReason, GenerationRequest, Purpose, VersionSpan

EOS = 2


def _draws(item: GenerationRequest, index: int) -> Array:
    return np.zeros(item.sampling.max_tokens, dtype=np.float32)


def _scheduler(slots: int = 4, budget: int = 100, context: int = 64) -> Scheduler:
    return Scheduler(max_concurrency=slots, prefill_tokens=budget, max_context=context)


def _admit(scheduler: Scheduler) -> list[int]:
    return [group.request.group_id for group in scheduler.admit(_draws, now=1.0)]


def _record(
    scheduler: Scheduler, tokens: list[int], version: int = 0
) -> tuple[list[RunningGroup], list[Move]]:
    return scheduler.record(tokens, [-1.0] * len(tokens), version=version, stop_ids={EOS}, now=2.0)


def test_groups_start_whole_and_in_order() -> None:
    scheduler = _scheduler(slots=4)
    for group_id, n in ((0, 2), (1, 3), (2, 1)):
        scheduler.submit(request(group_id, [5, 6], n=n))
    assert _admit(scheduler) == [0]  # group 1 does not fit, and group 2 may not overtake it
    assert (len(scheduler.running), scheduler.num_waiting) == (2, 2)
    _record(scheduler, [EOS, EOS])
    assert _admit(scheduler) == [1, 2]
    assert [s.slot for s in scheduler.running] == [0, 1, 2, 3]


def test_the_budget_of_prompt_tokens_bounds_a_step_but_never_stops_a_long_prompt() -> None:
    scheduler = _scheduler(budget=10)
    for group_id, length in ((0, 30), (1, 6), (2, 4), (3, 1)):
        scheduler.submit(request(group_id, [5] * length))
    assert _admit(scheduler) == [0]
    assert _admit(scheduler) == [1, 2]
    assert _admit(scheduler) == [3]


def test_ended_sequences_leave_and_the_last_ones_take_their_slots() -> None:
    scheduler = _scheduler()
    scheduler.submit(request(0, [5, 6, 7], n=4))
    _admit(scheduler)
    completed, moves = _record(scheduler, [EOS, 9, EOS, 9])
    assert completed == []
    # prompt of 3 and the newest token, whose keys and values are not there yet
    assert moves == [Move(source=3, target=0, length=3)]
    assert [(s.index, s.slot) for s in scheduler.running] == [(3, 0), (1, 1)]
    completed, moves = _record(scheduler, [EOS, EOS])
    assert [group.request.group_id for group in completed] == [0]
    assert moves == [] and scheduler.running == []
    lengths = [len(s.token_ids) for s in completed[0].sequences]
    assert lengths == [1, 2, 1, 2]
    assert all(s.finish_reason is FinishReason.STOP for s in completed[0].sequences)


def test_the_limit_ends_a_completion_with_reason_length_and_eos_wins_over_it() -> None:
    scheduler = _scheduler()
    scheduler.submit(request(0, [5], n=2, max_tokens=2))
    _admit(scheduler)
    _record(scheduler, [8, 8])
    completed, _ = _record(scheduler, [8, EOS])
    reasons = [s.finish_reason for s in completed[0].sequences]
    assert reasons == [FinishReason.LENGTH, FinishReason.STOP]


def test_spans_cover_the_completion_and_show_every_version() -> None:
    scheduler = _scheduler()
    scheduler.submit(request(0, [5], max_tokens=5))
    _admit(scheduler)
    for version in (3, 3, 4, 4, 6):
        completed, _ = _record(scheduler, [8], version)
    spans = completed[0].sequences[0].versions
    assert spans == [VersionSpan(0, 2, 3), VersionSpan(2, 4, 4), VersionSpan(4, 5, 6)]


def test_abort_returns_running_and_waiting_groups_once() -> None:
    scheduler = _scheduler(slots=2)
    scheduler.submit(request(5, [5], n=2))
    scheduler.submit(request(6, [5], purpose=Purpose.EVAL))
    _admit(scheduler)
    assert scheduler.abort_all() == [(Purpose.TRAIN, 5), (Purpose.EVAL, 6)]
    assert scheduler.running == [] and scheduler.num_waiting == 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"),
    [(10, 32, True), (32, 32, True), (40, 32, False), (63, 1, True), (64, 1, False)],
)
def test_prompt_and_limit_must_fit_the_context(prompt: int, max_tokens: int, fits: bool) -> None:
    scheduler = _scheduler(context=64)
    item = request(0, [5] * prompt, max_tokens=max_tokens)
    if fits:
        scheduler.check(item)
    else:
        with pytest.raises(ConfigError, match=rf"{prompt} tokens.*context of 64"):
            scheduler.check(item)


def test_a_group_larger_than_the_slots_is_refused_with_the_key_to_raise() -> None:
    with pytest.raises(ConfigError, match=r"5 completions.*max_concurrency is 4"):
        _scheduler(slots=4).check(request(0, [5], n=5))


@pytest.mark.parametrize("bad", [{"prompt": []}, {"max_tokens": 0}, {"n": 0}])
def test_empty_requests_are_refused(bad: dict[str, object]) -> None:
    item = request(0, **{"prompt": [5], **bad})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least 1"):
        _scheduler().check(item)
