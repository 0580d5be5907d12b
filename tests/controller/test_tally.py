"""The running count of training groups: silent while it adds up, and exact about what does not."""

from __future__ import annotations

from typing import Any

import pytest

from llamarl_hpc.controller.tally import Tally
from llamarl_hpc.errors import LlamarlError
from llamarl_hpc.storage.records import GroupRecord
from llamarl_hpc.types import Prompt, Purpose, Status

PROMPT = Prompt(prompt_id="0", text="1+1=", token_ids=[1, 2], columns={}, epoch=0)


def record(ticket: int, status: Status = Status.TRAINED, **changes: Any) -> GroupRecord:
    fields: dict[str, Any] = {
        "purpose": Purpose.TRAIN,
        "group_id": ticket,
        "attempt": 1,
        "issue": 1,
        "prompt": PROMPT,
        "status": status,
        "reason": "" if status is Status.TRAINED else "its replica died",
        "step": 0,
        "t_issued": 0.0,
        "t_resolved": 1.0,
    }
    return GroupRecord(**{**fields, **changes})


def test_what_is_issued_trained_lost_and_issued_again_adds_up() -> None:
    stored: list[GroupRecord] = []
    tally = Tally(stored.append)
    for ticket in range(4):
        tally.issue(ticket, 1)
    tally.check([2, 0, 3, 1])
    tally.store(record(0))
    tally.store(record(1, Status.ABANDONED))
    tally.issue(1, 2)
    tally.store(record(2, Status.DROPPED, reason="too old"))
    tally.store(record(9, Status.EVALUATION, purpose=Purpose.EVAL))
    tally.check([3, 1])
    assert tally.num_issued == 5
    assert tally.counts == {Status.TRAINED: 1, Status.ABANDONED: 1, Status.DROPPED: 1}
    assert [r.group_id for r in stored] == [0, 1, 2, 9]


@pytest.mark.parametrize(
    ("resolved", "in_flight", "said"),
    [
        ([], [0], "group 1 was lost"),
        ([], [0, 1, 1], "group 1 is in two places"),
        ([], [0, 1, 7], "group 7 came from nowhere"),
        ([record(0)], [0, 1], "group 0 came from nowhere"),
        ([record(0), record(0)], [1], "group 0 was trained but not on its way"),
        ([record(0, issue=2)], [1], "group 0 was trained but not on its way"),
        ([record(0, Status.DROPPED, reason="")], [1], "group 0 was dropped without a reason"),
    ],
)
def test_what_does_not_add_up_is_named(
    resolved: list[GroupRecord], in_flight: list[int], said: str
) -> None:
    tally = Tally(lambda group: None)
    tally.issue(0, 1)
    tally.issue(1, 1)
    for group in resolved:
        tally.store(group)
    with pytest.raises(LlamarlError, match=f"internal error in the accounting of groups: {said}"):
        tally.check(in_flight)
