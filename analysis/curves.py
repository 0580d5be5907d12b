"""A run over its optimizer steps, as tables: the numbers behind the figures of the notebooks.

Each function reads what it needs of a run and answers with a pandas table of the current lineage;
empty when there is nothing yet. Intervals are 95 %. Nothing here draws (`figures.py` does).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from analysis.read_run import Run
from analysis.statistics import mean_half_width
from llamarl_hpc.config.losses import PRESETS
from llamarl_hpc.storage.rollout_store.layout import ENUMS

if TYPE_CHECKING:
    import pandas as pd

_LENGTH = ENUMS["finish_reason"]["length"]
_QUANTILES = {"p5": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95}


def evaluations(run: Run) -> pd.DataFrame:
    """Held-out accuracy by policy version: accuracy, low, high (Wilson), num_correct, num_prompts,
    seconds it took."""
    import pandas as pd

    rows = [
        {
            "policy_version": e.policy_version,
            "accuracy": e.accuracy,
            "low": e.interval[0],
            "high": e.interval[1],
            "num_correct": e.num_correct,
            "num_prompts": e.num_prompts,
            "seconds": e.seconds,
        }
        for e in run.evaluations()
    ]
    return pd.DataFrame(rows).set_index("policy_version") if rows else pd.DataFrame()


def reward_by_step(run: Run, component: str | None = None) -> pd.DataFrame:
    """Reward of the rollouts that a step trained, or of one component: mean, low, high, num_groups.

    The interval is of the mean over prompt groups: completions of one prompt are alike, so they
    are no independent draws.
    """
    import pandas as pd

    name = "reward" if component is None else f"rewards/{component}"
    rows = run.table("rollouts", ["step", "group", name], run.group_mask(status="trained"))
    frame = pd.DataFrame({"step": rows["step"], "group": rows["group"], "value": rows[name]})
    groups = frame.groupby(["step", "group"])["value"].mean().dropna()
    by_step = groups.groupby("step").agg(["mean", "std", "count"])
    half = [
        mean_half_width(deviation, count)
        for deviation, count in zip(by_step["std"], by_step["count"], strict=True)
    ]
    return pd.DataFrame(
        {
            "mean": by_step["mean"],
            "low": by_step["mean"] - half,
            "high": by_step["mean"] + half,
            "num_groups": by_step["count"],
        }
    )


def staleness_by_step(run: Run) -> pd.DataFrame:
    """How many trained rollouts of a step had which staleness: one column for each staleness."""
    import pandas as pd

    rows = run.table("rollouts", ["step", "staleness"], run.group_mask(status="trained"))
    return pd.crosstab(
        pd.Series(rows["step"], name="step"), pd.Series(rows["staleness"], name="staleness")
    )


def lengths_by_step(run: Run) -> pd.DataFrame:
    """Tokens of the trained completions of a step: mean, p5, median, p95; `truncated` is the share
    that hit the limit."""
    import pandas as pd

    names = ["step", "completion_length", "finish_reason"]
    frame = pd.DataFrame(run.table("rollouts", names, run.group_mask(status="trained")))
    by_step = frame.groupby("step")["completion_length"]
    return pd.DataFrame(
        {
            "mean": by_step.mean(),
            **{name: by_step.quantile(_QUANTILES[name]) for name in ("p5", "median", "p95")},
            "truncated": (frame["finish_reason"] == _LENGTH).groupby(frame["step"]).mean(),
        }
    )


def ratio_by_staleness(run: Run, *, max_tokens: int = 4_000_000) -> pd.DataFrame:
    """Trainer's over generator's probability of trained tokens, by the rollout's staleness:
    quantiles, num_tokens, and `above_rho`, the share that `algorithm.rho` cuts (0 for a loss
    without it).

    Of all attempts; reads the newest files first and stops after `max_tokens`.
    """
    import pandas as pd

    ratios: dict[int, list[np.ndarray]] = {}
    seen = 0
    for _, file in run.store.scan(newest_first=True):
        lengths = file.read("rollouts/completion_length")
        staleness = np.repeat(file.read("rollouts/staleness"), lengths)
        trainer = file.read("tokens/logprob_trainer")
        known = ~np.isnan(trainer)
        ratio = np.exp(trainer[known] - file.read("tokens/logprob_behaviour")[known])
        for lag in np.unique(staleness[known]).tolist():
            ratios.setdefault(int(lag), []).append(ratio[staleness[known] == lag])
        seen += int(known.sum())
        if seen > max_tokens:
            break
    rho = rho_of(run) or math.inf
    rows = {}
    for lag in sorted(ratios):
        values = np.concatenate(ratios[lag])
        quantiles = dict(
            zip(_QUANTILES, np.quantile(values, list(_QUANTILES.values())), strict=True)
        )
        rows[lag] = quantiles | {
            "above_rho": float((values > rho).mean()),
            "num_tokens": len(values),
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("staleness")


def rho_of(run: Run) -> float | None:
    """The bound of importance weights in the run's loss; None if the loss has no such bound."""
    algorithm = run.config.get("algorithm") or {}
    preset = PRESETS.get(algorithm.get("loss_type", ""))
    rho = algorithm.get("rho")
    bounded = preset is not None and (preset.bounded_by == "rho" or preset.is_decoupled)
    return float(rho) if bounded and isinstance(rho, int | float) else None
