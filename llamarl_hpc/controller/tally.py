"""Exactly once, checked while the run goes on: whatever was handed out is on its way or resolved.

    issued = trained + dropped + abandoned + in flight

The same that `rollouts verify` finds out from the store afterwards, over the issues of one attempt.
The way of the groups and the books do the work; this only counts what they say, so that the two
sides of the equation come from different places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from llamarl_hpc.errors import LlamarlError
from llamarl_hpc.storage.records import GroupRecord
from llamarl_hpc.types import Purpose, Status


class Tally:
    """Between those who resolve training groups and the rollout store."""

    def __init__(self, store: Callable[[GroupRecord], None]) -> None:
        self._store = store
        self._open: dict[int, int] = {}  # ticket -> the issue that is on its way
        self._faults: list[str] = []
        self.num_issued = 0
        self.counts: Counter[Status] = Counter()

    def issue(self, ticket: int, issue: int) -> None:
        """A ticket was handed to a replica."""
        if ticket in self._open:
            self._faults.append(f"group {ticket} was issued while it was on its way")
        self.num_issued += 1
        self._open[ticket] = issue

    def store(self, record: GroupRecord) -> None:
        """A group has its status; on to the rollout store."""
        if record.purpose is Purpose.TRAIN:
            if self._open.pop(record.group_id, None) != record.issue:
                self._faults.append(
                    f"group {record.group_id} was {record.status.value} but not on its way"
                )
            if record.status is not Status.TRAINED and not record.reason:
                self._faults.append(
                    f"group {record.group_id} was {record.status.value} without a reason"
                )
            self.counts[record.status] += 1
        self._store(record)

    def check(self, in_flight: Sequence[int]) -> None:
        """Compare with the tickets that are on their way. Raises LlamarlError where they differ,
        which is a fault of this program."""
        faults = list(self._faults)
        known, found = self._open.keys(), set(in_flight)
        faults += [f"group {t} is in two places" for t, n in Counter(in_flight).items() if n > 1]
        faults += [f"group {t} was lost" for t in sorted(known - found)]
        faults += [f"group {t} came from nowhere" for t in sorted(found - known)]
        resolved = self.counts.total()
        if self.num_issued != resolved + len(in_flight):
            faults.append(
                f"{self.num_issued} groups were issued, {resolved} resolved, {len(in_flight)} are "
                "on their way"
            )
        if faults:
            more = f" (and {len(faults) - 1} more faults)" if len(faults) > 1 else ""
            raise LlamarlError(
                f"internal error in the accounting of groups: {faults[0]}{more}; no checkpoint was "
                "made of it: please report this, and resume from the one before"
            )
