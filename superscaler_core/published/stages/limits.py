"""Limits: the least of ``weight * limit + rest(limit)`` over limits of a pipeline's slowest stage.

A step takes the time of the slowest stage for every microbatch except one. So a planner tries
limits on the time of a stage, and computes the least rest of the step under each limit. The rest
does not grow with the limit. For a range of limits, ``weight * lowest + rest(highest)`` is
therefore a lower bound on all sums. A range whose bound is not below the best known sum is skipped
as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from superscaler_core.published.stages.problem import Array

Found = TypeVar("Found")

TOLERANCE = 1e-9
"""Relative tolerance: sums of the same times in other orders differ by less, so they count as
equal."""


def least_of_limits(
    limits: Array, lowest: float, weight: float, rest: Callable[[float], tuple[float, Found]]
) -> tuple[float, Found | None]:
    """The least sum, to a relative ``TOLERANCE``, and what ``rest`` returned with it.

    Args:
        limits: the limits that may be tried, in any order; infinite ones are left out.
        lowest: the lowest limit to try; below it every rest is infinite.
        weight: factor of a limit, at least 0.
        rest: function from a limit to the rest, which does not grow with the limit, and a result;
            the rest is infinite where nothing fits.

    Returns:
        Infinity and None if every rest is infinite.
    """
    ordered = np.unique(limits[np.isfinite(limits) & (limits >= lowest)])
    best: tuple[float, Found | None] = (np.inf, None)
    if not len(ordered):
        return best
    tried: dict[int, float] = {}

    def value(number: int) -> float:
        nonlocal best
        if number not in tried:
            tried[number], found = rest(float(ordered[number]))
            total = weight * float(ordered[number]) + tried[number]
            best = min(best, (total, found), key=lambda pair: pair[0])
        return tried[number]

    value(0)
    last = int(np.searchsorted(weight * ordered, best[0])) - 1
    left = [(1, last)]
    while left:
        low, high = left.pop()
        if low > high or weight * float(ordered[low]) + value(high) >= best[0] * (1 - TOLERANCE):
            continue
        middle = (low + high) // 2
        # The lower half is pushed last, so that it is tried first: good limits are low.
        left += [(middle + 1, high - 1), (low, middle)]
    return best
