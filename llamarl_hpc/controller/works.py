"""Everything that the controller works with: made once for an attempt, and wired together.

Who decides what is told in the modules themselves; here is only who knows whom.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamarl_hpc.config.schema import Config
from llamarl_hpc.controller.bell import Bell
from llamarl_hpc.controller.books import Books
from llamarl_hpc.controller.deadline import Deadline
from llamarl_hpc.controller.evaluation import HeldOut
from llamarl_hpc.controller.fleet import Fleet
from llamarl_hpc.controller.grace import Grace
from llamarl_hpc.controller.inbox import Inbox
from llamarl_hpc.controller.parts import Parts
from llamarl_hpc.controller.rollouts import RolloutFlow
from llamarl_hpc.controller.saving import Saving
from llamarl_hpc.controller.schedule import Replica, Schedule
from llamarl_hpc.controller.state import RunState
from llamarl_hpc.controller.tally import Tally
from llamarl_hpc.controller.timings import StepTimings
from llamarl_hpc.controller.trainer_line import TrainerLine
from llamarl_hpc.controller.weights import WeightFlow
from llamarl_hpc.observability.alarms import Alarms
from llamarl_hpc.placement import executor_names, role_of

_QUEUE_DEPTH = 2  # completions at a replica, as a multiple of what it decodes at a time


@dataclass(frozen=True, kw_only=True)
class Works:
    """One attempt's, and never exchanged."""

    bell: Bell
    fleet: Fleet  # the executors
    schedule: Schedule  # which ticket may start where
    flow: RolloutFlow  # from a prompt to the buffer
    heldout: HeldOut
    weights: WeightFlow
    trainer: TrainerLine
    saving: Saving
    inbox: Inbox
    tally: Tally
    books: Books
    alarms: Alarms
    timings: StepTimings
    deadline: Deadline
    grace: Grace

    @classmethod
    def wired(cls, config: Config, attempt: int, parts: Parts, state: RunState) -> Works:
        """Of an attempt that begins with `state`."""
        bell = Bell()
        replicas = {n: Replica(n) for n in executor_names(config) if role_of(n) == "generator"}
        schedule = _schedule(config, state, replicas)
        fleet = Fleet(config, parts.channel, parts.supervisor, bell)
        questions = [parts.heldout[k] for k in range(len(parts.heldout))]
        heldout = HeldOut(config, questions, replicas)
        tally = Tally(parts.writer.append)
        flow = RolloutFlow(
            config,
            fleet=fleet,
            bell=bell,
            schedule=schedule,
            heldout=heldout,
            prompt_of=parts.cursor.prompt_at,
            store=tally.store,
            references=parts.references,
            attempt=attempt,
        )
        flow.on_issued = tally.issue
        weights = WeightFlow(config, fleet, bell, replicas)
        saving = Saving(
            store=parts.checkpoints,
            writer=parts.writer,
            metrics=parts.metrics,
            bell=bell,
            fleet=fleet,
            timeout_s=config.channels.reply_timeout_s,
            expected_s=parts.checkpoint_s,
        )
        trainer = TrainerLine(
            config,
            fleet,
            bell,
            parts.references,
            refers_here=config.algorithm.beta > 0.0 and not flow.reference.is_on,
        )
        inbox = Inbox(
            parts.channel,
            bell=bell,
            fleet=fleet,
            replicas=replicas,
            flow=flow,
            weights=weights,
            trainer=trainer,
            saving=saving,
            progress=parts.progress,
            reply_timeout_s=config.channels.reply_timeout_s,
        )
        deadline = Deadline(config.launch.stop_margin_s)
        deadline.pace.checkpoint_s = parts.checkpoint_s
        return cls(
            bell=bell,
            fleet=fleet,
            schedule=schedule,
            flow=flow,
            heldout=heldout,
            weights=weights,
            trainer=trainer,
            saving=saving,
            inbox=inbox,
            tally=tally,
            books=Books(config, attempt, store=tally.store, metrics=parts.metrics),
            alarms=Alarms(config.alarms),
            timings=StepTimings(
                flow=flow,
                weights=weights,
                saving=saving,
                deadline=deadline,
                executors=fleet.members,
                replicas=replicas,
                elapsed_before_s=state.elapsed_s,
            ),
            deadline=deadline,
            grace=Grace(
                deadline.pace,
                signal_delay_s=config.launch.signal_delay_s,
                kill_wait_s=None if parts.job is None else parts.job.kill_wait_s,
            ),
        )


def _schedule(config: Config, state: RunState, replicas: dict[str, Replica]) -> Schedule:
    rollout = config.rollout
    room = max(config.generator.max_concurrency * _QUEUE_DEPTH, rollout.num_generations)
    return Schedule(
        prompts_per_step=rollout.prompts_per_step,
        num_generations=rollout.num_generations,
        max_staleness=config.algorithm.max_staleness,
        max_outstanding=room,
        next_ticket=state.step * rollout.prompts_per_step + state.dropped,
        dropped=state.dropped,
        end_ticket=config.trainer.max_steps * rollout.prompts_per_step,
        skipped_steps=state.step - state.policy_version,
        replicas=replicas,
    )
