"""Alarms: what in the metrics of a step says that training goes wrong.

Pure: metrics in, alarms out. An alarm begins when its condition has held for the configured number
of steps, and is told once until it has ended. Nothing is kept over a resume.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from llamarl_hpc.config.schema import AlarmsConfig

Metrics = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """One that has just begun."""

    name: str  # the key below `alarms`
    stops: bool
    value: float
    sentence: str


@dataclass
class _Watch:
    """A condition over steps. `look` gives the value and what is wrong with it ("" if nothing)."""

    name: str
    action: str
    steps: int
    look: Callable[[Metrics], tuple[float, str]]
    streak: int = 0  # steps in a row of which it is true

    def feed(self, metrics: Metrics) -> Alarm | None:
        value, problem = self.look(metrics)
        self.streak = self.streak + 1 if problem else 0
        if self.streak != self.steps:
            return None
        held = f" for {self.steps} steps" if self.steps > 1 else ""
        stops = self.action == "stop"
        return Alarm(name=self.name, stops=stops, value=value, sentence=f"{problem}{held}")


@dataclass
class _Window:
    """Mean of the last `size` values; None until there are so many."""

    size: int
    values: deque[float] = field(default_factory=deque)

    def add(self, value: float) -> float | None:
        self.values.append(value)
        if len(self.values) > self.size:
            self.values.popleft()
        return math.fsum(self.values) / self.size if len(self.values) == self.size else None


class Alarms:
    """All alarms of a run."""

    def __init__(self, config: AlarmsConfig) -> None:
        self._watches = [watch for watch in _watches(config) if watch.action != "off"]

    def check(self, metrics: Metrics) -> list[Alarm]:
        """Of one more step: the alarms that begin with it, those that stop the run first."""
        begun = [alarm for watch in self._watches if (alarm := watch.feed(metrics)) is not None]
        return sorted(begun, key=lambda alarm: not alarm.stops)

    @property
    def is_suspicious(self) -> bool:
        """The condition of an alarm that would stop the run is true, if not for long enough."""
        return any(w.streak > 0 and w.action == "stop" for w in self._watches)


def _watches(config: AlarmsConfig) -> Iterator[_Watch]:
    ess, kl, entropy = config.ess, config.mismatch_kl, config.entropy
    yield _Watch("not_finite", config.not_finite, 1, _not_finite)
    yield _Watch("no_signal", config.no_signal.action, config.no_signal.steps, _no_signal)
    yield _Watch("ess", ess.action, ess.steps, _below("ess", ess.limit, "alarms.ess"))
    yield _Watch(
        "mismatch_kl", kl.action, kl.steps, _above("mismatch/kl", kl.limit, "alarms.mismatch_kl")
    )
    yield _Watch(
        "entropy", entropy.action, entropy.steps, _below("entropy", entropy.limit, "alarms.entropy")
    )
    yield _Watch("reward", config.reward.action, 1, _Fall(config.reward.limit, config.reward.steps))
    yield _Watch(
        "length", config.length.action, 1, _Drift(config.length.limit, config.length.steps)
    )


def _not_finite(metrics: Metrics) -> tuple[float, str]:
    loss, norm = metrics["loss"], metrics["grad_norm"]
    if metrics["steps_refused"] or not (math.isfinite(loss) and math.isfinite(norm)):
        return norm, f"loss {loss:g} or gradient norm {norm:g} is not a finite number"
    return norm, ""


def _no_signal(metrics: Metrics) -> tuple[float, str]:
    share = metrics["frac_reward_zero_std"]
    return share, "no group had different rewards" if share >= 1.0 else ""


def _below(name: str, limit: float, key: str) -> Callable[[Metrics], tuple[float, str]]:
    return _beyond(name, lambda value: value < limit, f"below {key}.limit {limit:g}")


def _above(name: str, limit: float, key: str) -> Callable[[Metrics], tuple[float, str]]:
    return _beyond(name, lambda value: value > limit, f"above {key}.limit {limit:g}")


def _beyond(
    name: str, is_beyond: Callable[[float], bool], words: str
) -> Callable[[Metrics], tuple[float, str]]:
    def look(metrics: Metrics) -> tuple[float, str]:
        value = metrics[name]
        has_tokens = metrics["tokens/trained"] > 0  # else it is the value of nothing
        return value, f"{name} {value:.3g} was {words}" if has_tokens and is_beyond(value) else ""

    return look


class _Fall:
    """Falls of the averaged reward below the best that it was."""

    def __init__(self, limit: float, steps: int) -> None:
        self._limit, self._window, self._best = limit, _Window(steps), -math.inf

    def __call__(self, metrics: Metrics) -> tuple[float, str]:
        mean = self._window.add(metrics["reward/mean"])
        if mean is None:
            return math.nan, ""
        self._best = max(self._best, mean)
        if self._best - mean <= self._limit:
            return mean, ""
        return mean, (
            f"the reward averaged {mean:.3g} over {self._window.size} steps, more than "
            f"alarms.reward.limit {self._limit:g} below the {self._best:.3g} that it was"
        )


class _Drift:
    """Completions that became much longer or shorter than they were at first."""

    def __init__(self, limit: float, steps: int) -> None:
        self._limit, self._window, self._first = limit, _Window(steps), math.nan

    def __call__(self, metrics: Metrics) -> tuple[float, str]:
        mean = self._window.add(metrics["completions/mean_length"])
        if mean is None:
            return math.nan, ""
        if math.isnan(self._first):
            self._first = mean
        if self._first / self._limit <= mean <= self._first * self._limit:
            return mean, ""
        return mean, (
            f"completions had {mean:.3g} tokens over {self._window.size} steps, beyond "
            f"{self._limit:g} times (alarms.length.limit) the {self._first:.3g} of the first ones"
        )
