"""What the display shows, read off the controller."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from llamarl_hpc.observability.progress import ExecutorLine, Snapshot

if TYPE_CHECKING:
    from llamarl_hpc.controller.loop import Controller


def take_snapshot(controller: Controller) -> Snapshot:
    """A copy of the moment; the display never reaches into the controller."""
    state = controller.state
    waits = {"trainer": controller.flow.waiting_for(state.step)}
    return Snapshot(
        phase=controller.phase,
        step=state.step,
        max_steps=controller.config.trainer.max_steps,
        policy_version=state.policy_version,
        elapsed_s=state.elapsed_s + time.monotonic() - controller.started,
        metrics=controller.last_metrics,
        accuracies=list(controller.heldout.results),
        executors=[
            ExecutorLine(
                name=member.name,
                activity=member.activity,
                version=controller.schedule.replicas[member.name].version
                if member.name in controller.schedule.replicas
                else state.policy_version
                if member.name == "trainer"
                else None,
                waits_for=waits.get(member.name, "") if member.activity.startswith("wait") else "",
                restarts=member.restarts,
            )
            for member in controller.fleet.members.values()
        ],
    )
