"""What of the controller survives into the next attempt; goes into a checkpoint's state.json."""

from __future__ import annotations

from typing import Any

import msgspec


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """Immutable; each change makes a new one.

    Nothing is kept about groups on their way: tickets from `step * prompts_per_step + dropped` on
    are issued again, with the same prompts and the same random draws.
    """

    step: int = 0  # batches consumed, and the number of the next one
    dropped: int = 0  # groups that these steps replaced; so many tickets more have been used
    policy_version: int = 0  # optimizer steps applied; lags behind `step` by skipped updates
    next_eval_id: int = 0  # first evaluation group id that was never used
    elapsed_s: float = 0.0  # wall time of the attempts before this one
    resumed: bool = False  # this attempt continues a checkpoint

    def after_step(self, policy_version: int, *, dropped: int) -> RunState:
        """One more batch is consumed; the trainer is at `policy_version` now. `dropped`: groups
        that all steps so far have replaced."""
        return msgspec.structs.replace(
            self, step=self.step + 1, policy_version=policy_version, dropped=dropped
        )

    def after_evaluation(self, next_eval_id: int) -> RunState:
        return msgspec.structs.replace(self, next_eval_id=next_eval_id)

    def to_checkpoint(self, prompts: dict[str, Any], elapsed_s: float) -> dict[str, Any]:
        """JSON of this moment; `prompts` is the cursor's state (which data set, which order)."""
        return {
            "step": self.step,
            "policy_version": self.policy_version,
            "dropped": self.dropped,
            "next_eval_id": self.next_eval_id,
            "elapsed_s": elapsed_s,
            "prompts": prompts,
        }

    @classmethod
    def from_checkpoint(cls, state: dict[str, Any]) -> RunState:
        return cls(
            step=state["step"],
            policy_version=state["policy_version"],
            dropped=state.get("dropped", 0),
            next_eval_id=state["next_eval_id"],
            elapsed_s=state["elapsed_s"],
            resumed=True,
        )
