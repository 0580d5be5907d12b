"""Confidence intervals of proportions, in closed form."""

from __future__ import annotations

import math

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
