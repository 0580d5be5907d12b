"""Confidence intervals of proportions, in closed form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, variance

Z95 = 1.959963984540054  # two-sided 95 % quantile of the normal distribution


def wilson_interval(correct: float, total: int) -> tuple[float, float]:
    """95 % score interval of a proportion (Wilson 1927); (0, 1) when nothing was counted."""
    if total == 0:
        return 0.0, 1.0
    share, z2 = correct / total, Z95**2
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = Z95 * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2)) / (1 + z2 / total)
    return max(0.0, centre - half), min(1.0, centre + half)


def difference_interval(before: tuple[float, int], after: tuple[float, int]) -> tuple[float, float]:
    """95 % interval of the rise of a proportion (Newcombe 1998, method 10).

    Arguments are (correct, total), taken as independent: for the same questions before and after
    it is wider than need be.
    """
    (p1, (l1, u1)), (p2, (l2, u2)) = (
        (correct / max(total, 1), wilson_interval(correct, total))
        for correct, total in (before, after)
    )
    rise = p2 - p1
    down = math.sqrt((p2 - l2) ** 2 + (u1 - p1) ** 2)
    up = math.sqrt((u2 - p2) ** 2 + (p1 - l1) ** 2)
    return rise - down, rise + up


def t_quantile95(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t: exact for 1 and 2 degrees of freedom, within 0.2 %
    above (Abramowitz and Stegun 26.7.5); NaN for none."""
    if freedom < 1:
        return math.nan
    if freedom == 1:
        return math.tan(0.475 * math.pi)
    if freedom == 2:
        return 0.95 / math.sqrt(2 * 0.975 * 0.025)
    z = Z95
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum((term / freedom**power for power, term in enumerate(terms, start=1)), 0.0)


def mean_half_width(deviation: float, count: int) -> float:
    """Half of the 95 % interval of a mean of `count` independent values with this sample standard
    deviation; NaN for fewer than two values."""
    return t_quantile95(count - 1) * deviation / math.sqrt(count) if count > 1 else math.nan


def mean_difference_interval(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """95 % interval of mean(b) - mean(a) of independent values (Welch 1947); NaN for fewer than two
    values of either."""
    if min(len(a), len(b)) < 2:
        return math.nan, math.nan
    rise = fmean(b) - fmean(a)
    errors = [variance(values) / len(values) for values in (a, b)]
    error = sum(errors)
    if error == 0.0:
        return rise, rise
    parts = zip(errors, (a, b), strict=True)
    freedom = error**2 / sum(e**2 / (len(values) - 1) for e, values in parts)
    half = t_quantile95(int(freedom)) * math.sqrt(error)
    return rise - half, rise + half
