"""The reward executor: a pool of killable worker processes behind one loop.

Groups come in any order and leave in the order in which they are done; the controller matches
them by id. Nothing a completion makes a scorer do can stop this loop: a worker that hangs or
swells is killed and replaced, its completion scores 0 with the reason.
"""

from __future__ import annotations

from llamarl_hpc.channels.messages import Score, Scored, Stop
from llamarl_hpc.executors.base import Context
from llamarl_hpc.rewards.pool import RewardPool

_IDLE_WAIT_S = 0.25
_BUSY_WAIT_S = 0.002


class RewardExecutor:
    """Feeds the pool from the channel and the channel from the pool."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.pool = RewardPool(context.config)
        self.outstanding = 0  # groups in the pool

    def run(self) -> None:
        self.pool.start()
        self.context.say_hello()
        try:
            while self._take_messages():
                self._collect()
        finally:
            self.pool.close()

    def _take_messages(self) -> bool:
        """False when the controller said Stop."""
        if not self.outstanding:
            self.context.line.set_activity("wait for completions")
        message = self.context.receive(0.0 if self.outstanding else _IDLE_WAIT_S)
        if isinstance(message, Stop):
            return False
        if isinstance(message, Score):
            for item in message.items:
                self.pool.submit(item)
            self.outstanding += len(message.items)
        elif message is not None:
            raise self.context.unexpected(message)
        return True

    def _collect(self) -> None:
        if not self.outstanding:
            return
        self.context.line.set_activity(f"score {self.outstanding} groups")
        done = self.pool.collect(timeout_s=_BUSY_WAIT_S)
        if done:
            self.outstanding -= len(done)
            for group in done:
                self.context.tracer.record("score", group.t_start, group.t_end)
            self.context.line.send(Scored(groups=done))
