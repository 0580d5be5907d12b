"""What the display shows, read off the parts of the controller."""

from __future__ import annotations

from llamarl_hpc.config.schema import Config
from llamarl_hpc.controller.fleet import Fleet, Member
from llamarl_hpc.controller.rollouts import RolloutFlow
from llamarl_hpc.controller.state import RunState
from llamarl_hpc.observability.progress import ExecutorLine, Snapshot


def take_snapshot(
    config: Config,
    state: RunState,
    fleet: Fleet,
    flow: RolloutFlow,
    *,
    phase: str,
    elapsed_s: float,
    metrics: dict[str, float],
) -> Snapshot:
    """A copy of the moment; the display never reaches into the controller."""
    return Snapshot(
        phase=phase,
        step=state.step,
        max_steps=config.trainer.max_steps,
        policy_version=state.policy_version,
        elapsed_s=elapsed_s,
        metrics=metrics,
        accuracies=list(flow.heldout.results),
        executors=[_line(member, state, flow) for member in fleet.members.values()],
    )


def _line(member: Member, state: RunState, flow: RolloutFlow) -> ExecutorLine:
    replica = flow.schedule.replicas.get(member.name)
    is_trainer = member.name == "trainer"
    version = replica.version if replica else state.policy_version if is_trainer else None
    is_waiting = is_trainer and member.activity.startswith("wait")
    return ExecutorLine(
        name=member.name,
        activity=member.activity,
        version=version,
        waits_for=flow.waiting_for(state.step) if is_waiting else "",
        restarts=member.restarts,
    )
