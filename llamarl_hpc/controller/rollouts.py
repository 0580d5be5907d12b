"""The way of a prompt group: issued -> generated -> scored -> buffer (or evaluation).

Everything that is on its way is in exactly one of four places, and leaves the last one with a
status in the rollout store:

    generating: at a replica      scoring: at the reward executor  buffer: waits for   taken: at
    (lost replica: issued again)  (lost executor: scored again)    its optimizer step  the trainer

With a reference executor there is a fifth between scoring and buffer: `controller/reference.py`.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable

from llamarl_hpc.batching.buffer import RolloutBuffer, ScoredGroup, credit_of
from llamarl_hpc.batching.credit import CreditRules
from llamarl_hpc.channels.messages import Generate, GroupScores, Score
from llamarl_hpc.config.schema import Config
from llamarl_hpc.controller.bell import Bell
from llamarl_hpc.controller.busy import BusyClock
from llamarl_hpc.controller.evaluation import HeldOut
from llamarl_hpc.controller.fleet import Fleet
from llamarl_hpc.controller.issued import Issued, Key, evaluation_request, training_request
from llamarl_hpc.controller.records import record_of
from llamarl_hpc.controller.reference import ReferenceFlow, ReferenceModels
from llamarl_hpc.controller.schedule import Replica, Schedule
from llamarl_hpc.storage.records import GroupRecord
from llamarl_hpc.types import (
    GroupCompletions,
    Prompt,
    Purpose,
    Status,
)

log = logging.getLogger(__name__)


class RolloutFlow:
    """Owns the buffer and everything between a prompt and the buffer."""

    def __init__(
        self,
        config: Config,
        *,
        fleet: Fleet,
        bell: Bell,
        schedule: Schedule,
        heldout: HeldOut,
        prompt_of: Callable[[int], Prompt],
        store: Callable[[GroupRecord], None],
        references: ReferenceModels,
        attempt: int,
    ) -> None:
        self.config, self.fleet, self.bell = config, fleet, bell
        self.schedule, self.prompt_of, self.store, self.attempt = (
            schedule,
            prompt_of,
            store,
            attempt,
        )
        rules = dataclasses.replace(CreditRules.of(config), beta=0.0)
        self.buffer = RolloutBuffer(
            prompts_per_step=schedule.prompts_per_step,
            first_step=schedule.step_of(schedule.next_ticket),
            first_ticket=schedule.next_ticket,
            max_resamples=max_resamples(config),
            is_constant=lambda g: not g.failed and credit_of([g], rules).constant[0],
        )
        self.heldout = heldout
        self.busy = BusyClock()
        self.reference = ReferenceFlow(
            config,
            references,
            fleet=fleet,
            busy=self.busy,
            step_of=schedule.step_of,
            put=self._put,
        )
        self._generating: dict[Key, Issued] = {}
        self._scoring: dict[Key, Issued] = {}
        self._taken: list[ScoredGroup] = []  # at the trainer
        self._num_complaints = 0  # groups whose scoring went wrong
        self.on_issued: Callable[[int, int], None] = lambda ticket, issue: None
        self._issues: dict[int, int] = {}  # ticket -> times issued, for tickets under way

    # ------------------------------------------------------------------ issuing

    async def pump(self) -> None:
        """Send out everything that may start now: first the evaluation, then tickets in order."""
        orders: dict[str, list[Issued]] = {}
        if self.heldout.current is not None:
            for replica, number in self.heldout.current.assign(self._live_replicas()):
                orders.setdefault(replica, []).append(self._issue_eval(number, replica))
        for replica, ticket in self.schedule.assign():
            orders.setdefault(replica, []).append(self._issue_ticket(ticket, replica))
        for replica, issued in orders.items():  # all booked before anything can be lost
            self._generating.update((group.key, group) for group in issued)
            self.busy.begin(replica, len(issued))
        for replica, issued in orders.items():
            await self.fleet.send(replica, Generate(requests=[g.request for g in issued]))
        await self.reference.pump()

    def _live_replicas(self) -> list[Replica]:
        return [r for r in self.schedule.replicas.values() if r.ready]

    def _issue_ticket(self, ticket: int, replica: str) -> Issued:
        self._issues[ticket] = issue = self._issues.get(ticket, 0) + 1
        self.on_issued(ticket, issue)
        prompt = self.prompt_of(ticket)
        request = training_request(self.config, ticket, prompt)
        return Issued(prompt=prompt, request=request, replica=replica, issue=issue)

    def _issue_eval(self, number: int, replica: str) -> Issued:
        assert self.heldout.current is not None
        prompt = self.heldout.current.prompt_of(number)
        request = evaluation_request(self.config, number, prompt)
        return Issued(prompt=prompt, request=request, replica=replica, issue=1)

    # ------------------------------------------------------------------ coming back

    async def on_generated(self, replica: str, groups: list[GroupCompletions]) -> None:
        """Completions arrived: make room at the replica, ask for scores."""
        items = []
        for group in groups:
            issued = self._generating.get((group.purpose, group.group_id))
            if issued is None or issued.replica != replica:
                log.warning("%s sent %s group %d that nobody waits for", replica, *_id(group))
                continue
            del self._generating[issued.key]
            self._return_room(issued)
            self.busy.end(replica)
            issued.done, issued.t_generated = group, time.time()
            issued.asked_at = time.monotonic()
            self._scoring[issued.key] = issued
            items.append(issued.score_item())
        if items:
            self.busy.begin("reward", len(items))
            await self.fleet.send("reward", Score(items=items))

    def _return_room(self, issued: Issued) -> None:
        if issued.is_for_training:
            self.schedule.replicas[issued.replica].sequences -= issued.request.num_generations

    def on_scored(self, groups: list[GroupScores]) -> None:
        """Scores arrived: the group is ready for its optimizer step, or is a held-out answer."""
        for scores in groups:
            issued = self._scoring.pop((scores.purpose, scores.group_id), None)
            if issued is None:
                continue  # scored twice: asked again after the reward executor was lost
            self.busy.end("reward")
            assert issued.done is not None
            group = ScoredGroup(
                ticket=scores.group_id,
                issue=issued.issue,
                prompt=issued.prompt,
                generator=issued.replica,
                completions=issued.done.completions,
                rewards=scores.components,
                reward=scores.total,
                error=scores.error or _limits(scores.reasons),
                failed=bool(scores.error),
                t_issued=issued.t_issued,
                t_generated=issued.t_generated,
                t_scored=time.time(),
            )
            self._complain(group)
            if scores.purpose is Purpose.TRAIN:
                self.reference.add(group)
            else:
                self._on_evaluated(group)
        self.bell.ring()

    def _put(self, group: ScoredGroup) -> None:
        """A group is ready for its step; without spread in its rewards it may be replaced."""
        for dropped in self.buffer.put(group):
            self.schedule.dropped += 1
            self._issues.pop(dropped.ticket, None)
            self.store(
                record_of(
                    dropped,
                    purpose=Purpose.TRAIN,
                    status=Status.DROPPED,
                    reason="constant reward",
                    attempt=self.attempt,
                    temperature=self.config.rollout.temperature,
                )
            )

    def _on_evaluated(self, group: ScoredGroup) -> None:
        evaluation = self.heldout.current
        counts = evaluation is not None and evaluation.owns(group.ticket)
        if evaluation is not None and counts:
            evaluation.add(group)
        self.store(
            record_of(
                group,
                purpose=Purpose.EVAL,
                status=Status.EVALUATION if counts else Status.DROPPED,
                reason="" if counts else "its evaluation was given up",
                step=group.version_min,
                attempt=self.attempt,
                temperature=self.config.evaluation.temperature,
            )
        )

    def _complain(self, group: ScoredGroup) -> None:
        """Say that scoring goes wrong: the first time, and each time it has doubled."""
        if group.error:
            self._num_complaints += 1
            if self._num_complaints & (self._num_complaints - 1) == 0:
                what = "could not be scored" if group.failed else "hit a limit in scoring"
                log.warning("%d groups %s so far: %s", self._num_complaints, what, group.error)

    # ------------------------------------------------------------------ training

    def take(self, step: int) -> list[ScoredGroup]:
        """The groups of an optimizer step. Unless they are said to be `booked`, the end of the
        run finds them unresolved."""
        self._taken = self.buffer.take(step)
        return self._taken

    def booked(self) -> None:
        """The groups that were taken are in the store."""
        end = self._taken[-1].ticket + 1
        self._taken = []
        for old in [ticket for ticket in self._issues if ticket < end]:
            del self._issues[old]

    # ------------------------------------------------------------------ losses

    def on_replica_lost(self, replica: str, reason: str) -> None:
        """Its groups are abandoned in the books and issued again, before any new one."""
        for key, issued in list(self._generating.items()):
            if issued.replica != replica:
                continue
            del self._generating[key]
            self._return_room(issued)
            self._abandon(issued, reason)
            if issued.is_for_training:
                self.schedule.give_back(issued.request.group_id)
            elif self.heldout.current is not None:
                self.heldout.current.give_back(issued.request.group_id)  # if it is of this one
        self.busy.clear(replica)

    async def on_reward_ready(self) -> None:
        """The reward executor is up (again): it gets everything that has no score yet."""
        for issued in self._scoring.values():
            issued.asked_at = time.monotonic()
        items = [issued.score_item() for issued in self._scoring.values()]
        self.busy.clear("reward")
        if items:
            self.busy.begin("reward", len(items))
            await self.fleet.send("reward", Score(items=items))

    def in_flight(self) -> list[int]:
        """Tickets of the training groups that are on their way."""
        keys = [*self._generating, *self._scoring]
        return [
            *(number for purpose, number in keys if purpose is Purpose.TRAIN),
            *self.reference.tickets(),
            *self.buffer.tickets(),
            *(group.ticket for group in self._taken),
        ]

    def abandon_all(self, reason: str) -> int:
        """The run ends here: whatever is on its way gets its status. Returns how many groups."""
        count = 0
        for issued in [*self._generating.values(), *self._scoring.values()]:
            self._abandon(issued, reason)
            count += 1
        self._generating.clear()
        self._scoring.clear()
        taken, self._taken = self._taken, []
        for group in [*taken, *self.reference.drain(), *self.buffer.drain()]:
            self.store(
                record_of(
                    group,
                    purpose=Purpose.TRAIN,
                    status=Status.ABANDONED,
                    reason=reason,
                    attempt=self.attempt,
                    temperature=self.config.rollout.temperature,
                )
            )
            count += 1
        return count

    def _abandon(self, issued: Issued, reason: str) -> None:
        self.store(issued.abandoned(reason, attempt=self.attempt))

    # ------------------------------------------------------------------ who waits for whom

    def sampling_figures(self, step: int) -> dict[str, float]:
        """Of a step that has been taken, with dynamic sampling."""
        if not self.config.algorithm.dynamic_sampling:
            return {}
        replaced = self.buffer.replaced(step)
        at_bound = replaced == max_resamples(self.config)
        return {
            "dynamic_sampling/replaced": float(replaced),
            "dynamic_sampling/bound_reached": float(at_bound),
        }

    def waiting_for(self, step: int) -> str:
        """What the batch of `step` waits for, in words; empty when it is complete."""
        missing = self.buffer.missing(step)
        if not missing:
            return ""
        at = sorted(
            {
                self._generating[(Purpose.TRAIN, ticket)].replica
                for ticket in missing
                if (Purpose.TRAIN, ticket) in self._generating
            }
        )
        scoring = any((Purpose.TRAIN, ticket) in self._scoring for ticket in missing)
        names = [*at, *(["reward"] if scoring else [])]
        names += ["reference"] if set(missing) & set(self.reference.tickets()) else []
        return f"{len(missing)} groups of step {step} from {', '.join(names) or 'new weights'}"

    def oldest_request_s(self, executor: str) -> float:
        """Seconds since the oldest unanswered request to this executor was sent; 0 if none."""
        if executor == "reference":
            return self.reference.oldest_request_s()
        if executor == "reward":
            times = [issued.asked_at for issued in self._scoring.values()]
        else:
            times = [i.asked_at for i in self._generating.values() if i.replica == executor]
        return time.monotonic() - min(times) if times else 0.0


def max_resamples(config: Config) -> int:
    """Groups that a step may replace."""
    algorithm = config.algorithm
    if not algorithm.dynamic_sampling:
        return 0
    if algorithm.max_resamples is not None:
        return algorithm.max_resamples
    return 3 * config.rollout.prompts_per_step


def _id(group: GroupCompletions) -> tuple[str, int]:
    return group.purpose.value, group.group_id


def _limits(reasons: list[str]) -> str:
    """Which limits of the reward pool made how many completions score 0; empty if none did."""
    hit = Counter(reason for reason in reasons if reason)
    return ", ".join(f"{reason} ({number} completions)" for reason, number in hit.items())
