"""What is written down of every optimizer step: rows of its rollouts, and its figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from llamarl_hpc.batching.buffer import ScoredGroup, credit_of, split_by_rollout
from llamarl_hpc.batching.credit import CreditRules
from llamarl_hpc.batching.staleness import staleness
from llamarl_hpc.channels.messages import Trained
from llamarl_hpc.config.schema import Config
from llamarl_hpc.controller.records import record_of
from llamarl_hpc.controller.step_metrics import batch_metrics
from llamarl_hpc.observability.metrics_log import MetricsLog
from llamarl_hpc.storage.records import GroupRecord
from llamarl_hpc.types import Purpose, Status, TrainBatch


class Books:
    """Writes to the rollout store and to the metrics; decides nothing."""

    def __init__(
        self,
        config: Config,
        attempt: int,
        *,
        store: Callable[[GroupRecord], None],
        metrics: MetricsLog,
    ) -> None:
        self._bound, self._rules = config.algorithm.max_staleness, CreditRules.of(config)
        self._attempt, self._store, self._metrics = attempt, store, metrics

    def trained(
        self,
        groups: Sequence[ScoredGroup],
        batch: TrainBatch,
        trained: Trained,
        *,
        trainer_version: int,
    ) -> None:
        """Rows of a consumed batch, with what the trainer saw of each token."""
        logprobs_R = split_by_rollout(trained.logprobs, batch)
        mask_R = split_by_rollout(batch.loss_mask, batch)
        entropy_R = []
        if trained.entropy is not None:
            entropy_R = split_by_rollout(trained.entropy, batch)
        start = 0
        for group in groups:
            rows = slice(start, start + len(group.completions))
            lag = staleness(trainer_version=trainer_version, version_min=group.version_min)
            self._store(
                record_of(
                    group,
                    purpose=Purpose.TRAIN,
                    status=Status.TRAINED,
                    attempt=self._attempt,
                    temperature=batch.temperature,
                    step=batch.step,
                    staleness=lag,
                    advantage=batch.advantages[rows].tolist(),
                    logprobs_trainer=logprobs_R[rows],
                    loss_mask=mask_R[rows],
                    entropy=entropy_R[rows],
                )
            )
            start = rows.stop

    def step(
        self,
        groups: Sequence[ScoredGroup],
        trained: Trained,
        *,
        trainer_version: int,
        timings: Mapping[str, float],
    ) -> dict[str, float]:
        """The figures of a step, now in the metrics: the trainer's, the batch's, the clock's."""
        metrics = {
            **trained.metrics,
            **batch_metrics(
                groups,
                trainer_version=trainer_version,
                credit=credit_of(groups, self._rules),
            ),
            **timings,
        }
        lag = metrics["staleness/max"]
        assert lag <= self._bound, f"staleness {lag} exceeds the bound {self._bound}"
        self._metrics.step(trained.step, policy_version=trained.version, metrics=metrics)
        return metrics
