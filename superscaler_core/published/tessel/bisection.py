"""Bisection: the least number of ticks for which there is a table of counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from superscaler_core.published.tessel.counts import OutOfTimeError

Found = TypeVar("Found")


def least(
    low: int, high: int, at_high: Found, solve: Callable[[int], tuple[int, Found] | None]
) -> tuple[int, Found, bool]:
    """The least number that has a solution, if every larger number has one too.

    Args:
        low: no number below it has a solution.
        high, at_high: a number with its solution.
        solve: finds a solution for a number, or for a smaller one; None if there is none.

    Returns:
        The least number for which a solution was found, the solution, and whether it is proved
        that no smaller number has one. It is not proved if the time was over before.
    """
    # The lower bound is tried first: it often has a solution, which then ends the search.
    middle = low
    while low < high:
        try:
            found = solve(middle)
        except OutOfTimeError:
            return high, at_high, False
        if found is None:
            low = middle + 1
        else:
            high, at_high = found
        middle = (low + high) // 2
    return high, at_high, True
