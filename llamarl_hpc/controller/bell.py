"""How the controller's tasks wait for each other: look, and look again when something changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Bell:
    """Whoever changes the controller's state rings; whoever waits re-checks its condition."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        """Wake every waiter once."""
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Return True when `condition` holds, False when `timeout_s` is over."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await self._event.wait()
        except TimeoutError:
            return condition()
        return True
