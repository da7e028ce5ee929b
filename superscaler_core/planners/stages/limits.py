"""Limits: the least of ``weight * limit + rest(limit)`` over limits of a pipeline's slowest stage.

Where a step takes the slowest stage for all microbatches but one, a planner tries the times that a
stage may take at most. The higher the limit, the less is the rest. So among neighbouring limits no
sum is below the lowest limit's weight and the highest limit's rest, and those that cannot be better
than what is known are left out together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from superscaler_core.planners.stages.problem import Array

Found = TypeVar("Found")

TOLERANCE = 1e-9
"""Relative: sums of the same times in other orders differ by less, and are not tried apart."""


def least_of_limits(
    limits: Array, lowest: float, weight: float, rest: Callable[[float], tuple[float, Found]]
) -> tuple[float, Found | None]:
    """The least sum, to a relative ``TOLERANCE``, and what ``rest`` found with it.

    Args:
        limits: those that may be tried, in any order; infinite ones are left out.
        lowest: no lower one is tried, as none has a finite rest.
        weight: of a limit, at least 0.
        rest: from a limit to the rest, which does not grow with it; infinite where nothing fits.

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
        # The lower half last, so that it is tried first: good limits are low.
        left += [(middle + 1, high - 1), (low, middle)]
    return best
