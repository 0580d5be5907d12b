"""What a failing rank leaves behind for the controller's message."""

from __future__ import annotations

import msgspec


class FailureReport(msgspec.Struct, frozen=True, kw_only=True):
    """Written to `<executor>.<rank>.failure.json` in the attempt's folder before the rank ends."""

    executor: str
    instance: int  # which start of the executor
    rank: int
    host: str
    reason: str
    user_error: bool  # the user can fix it: shown as one sentence, exit code 2
    traceback: str
