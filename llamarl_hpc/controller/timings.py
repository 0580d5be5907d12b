"""Where the time between two steps went, per executor; the figures `time/*` and `idle_ratio/*`."""

from __future__ import annotations

import time
from collections.abc import Collection

from llamarl_hpc.controller.deadline import Deadline
from llamarl_hpc.controller.rollouts import RolloutFlow
from llamarl_hpc.controller.saving import Saving
from llamarl_hpc.controller.weights import WeightFlow


class StepTimings:
    """Measures from the end of one step to the end of the next. `replicas`: the generators."""

    def __init__(
        self,
        *,
        flow: RolloutFlow,
        weights: WeightFlow,
        saving: Saving,
        deadline: Deadline,
        executors: Collection[str],
        replicas: Collection[str],
        elapsed_before_s: float,
    ) -> None:
        """`elapsed_before_s`: what earlier attempts took."""
        self._flow, self._weights, self._saving = flow, weights, saving
        self._deadline, self._executors, self._replicas = deadline, executors, replicas
        self._before_s, self._start = elapsed_before_s, time.monotonic()
        self._step_end = self._start

    @property
    def elapsed_s(self) -> float:
        """Seconds of the whole run, earlier attempts included."""
        return self._before_s + time.monotonic() - self._start

    def begin(self) -> None:
        """What was before the first step does not count."""
        self._step_end = time.monotonic()

    @property
    def since_step_s(self) -> float:
        """Seconds since the last step ended."""
        return time.monotonic() - self._step_end

    def end_step(self, *, waited_s: float, tokens: int) -> dict[str, float]:
        """A step has ended: its figures. `waited_s`: for its batch; `tokens`: of completions."""
        step_s = self.since_step_s
        self.begin()
        self._deadline.pace.steps.append(step_s)
        self._deadline.pace.checkpoint_s = self._saving.last_seconds
        busy = {name: self._flow.busy.take(name) for name in self._executors}
        generators = [busy[name] for name in self._replicas]
        figures = {
            "time/step": step_s,
            "time/wait_for_batch": waited_s,
            "time/weight_sync": self._weights.last_seconds,
            "time/weight_sync_blocking": self._weights.last_blocking_seconds,
            "weight_sync/mib": self._weights.last_num_bytes / 2**20,
            "weight_sync/sent_share": self._weights.last_sent_share,
            "time/checkpoint_blocking": self._saving.blocked_s(),
            "time/elapsed": self.elapsed_s,
            "perf/completion_tokens_per_second": tokens / step_s,
            "idle_ratio/trainer": min(1.0, waited_s / step_s),
            "idle_ratio/generator": max(0.0, 1.0 - sum(generators) / len(generators) / step_s),
            "idle_ratio/reward": max(0.0, 1.0 - busy["reward"] / step_s),
            "buffer/groups": float(len(self._flow.buffer)),
        }
        if "reference" in busy:
            figures["idle_ratio/reference"] = max(0.0, 1.0 - busy["reference"] / step_s)
        return figures
